# Sourced by the batch scripts of this folder: what a job does before, around and after its training.
#
# SLURM announces the end of a job (its time limit, a preemption) to this shell, by USR1 (#SBATCH --signal=B:USR1@...),
# to the ranks by TERM, or to both. `train COMMAND ...` runs the command, passes USR1 on to the ranks, which finish their
# step and save, and puts the job back into the queue. The status file that rank 0 writes says what became of the run, and
# how many steps the start gained: after two in a row without one the job fails, else it would come again for ever.

# The last task of an array has the array's own number as SLURM_JOB_ID, by which SLURM would signal and requeue all tasks.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

began=$(date +%s)
export MEGALITE_JOB_BEGAN=$began # see megalite/train/run.py

passed() { echo $(($(date +%s) - began)); } # seconds

warned= # after so many seconds, or TERM: the ranks alone
warn() { # the ranks alone, not this shell
    warned=$(passed)
    scancel --signal=USR1 "$job" || echo "no rank could be told of the end" >&2
}
trap warn USR1
trap 'warned=${warned:-TERM}' TERM # the ranks have got it, too

was_told() { # whether the ranks were, by the exit status of srun or by SLURM
    case $1,$(of_job PreemptTime) in
        138,* | 143,* | *,[0-9]*) warned=${warned:-TERM} ;;
    esac
}

refuse() {
    echo "$*" >&2
    exit 2
}

of_job() { # what SLURM says of it under this name
    { scontrol show job --oneliner "$job" | sed -n "s/.* $1=\(${2-[^ ]*}\).*/\1/p"; } || :
}

told() { echo "$(cat "$status" 2>/dev/null)"; }

starts() { # a line for each, the last one for this: what its status file told, or nothing
    tail -n +2 "$earlier"
    told
}

number() { # that the newest start has told which knows it
    starts | sed -n "s/.*\"$1\": \([0-9][0-9.]*\).*/\1/p" | tail -n 1
}

vain() { # whether the last two of these lines tell of no step that was gained
    tail -n 2 | awk '!/"gained": [1-9]/ && !(/"stopped"/ && !/"gained"/) { vain++ } END { exit vain < 2 }'
}

limit() { # of the job, in seconds; nothing where it has none
    of_job TimeLimit | awk -F '[-:]' '/^[0-9]/ { print (NF > 3 ? $1 : 0) * 86400 + $(NF - 2) * 3600 + $(NF - 1) * 60 + $NF }'
}

give_up() { # and say what there was time for, and which options of sbatch would do
    local start_up step limit before need spare words
    start_up=$(number start_up_s) step=$(number step_s) limit=$(limit) need=$((2 * $(passed)))
    words="start-up was not over${warned:+ after $(passed) s}"
    [ -z "$start_up" ] || { words="start-up took $start_up s" need=$((need - ${start_up%.*})); }
    if [ -n "$step" ]; then
        words+=", a step $step s" need=$((${start_up%.*} + 2 * ${step%.*} + 2))
    else
        words+=", no step was saved"
    fi
    exec >&2
    echo "megalite: two starts in a row gained no step: the job fails"
    echo "    $words"
    case $warned,$limit in
        [0-9]*,[0-9]*)
            before=$((limit - warned)) spare=$((limit - need - 60)) # SLURM may be so early
            echo "    the warning came after $warned s, $before s before the end of --time"
            echo "    --time=$(((need + before + 119) / 60)) leaves room for both"
            if [ "$spare" -ge 30 ]; then
                echo "    so does --signal=B:USR1@$spare, where a step and its save fit into $spare s"
            else
                echo "    without a longer --time no --signal leaves room for a step and its save"
            fi ;;
        [0-9]*) echo "    a longer --time leaves more room, a later --signal (B:USR1@SECONDS) too" ;;
        *) echo "    the job was preempted, or lost a node: neither --time nor --signal changes that" ;;
    esac
    rm -f "$earlier"
    exit 1
}

requeue() { # unless the job was cancelled: then it must not come again
    [ "$(of_job JobState)" = RUNNING ] || return 0
    if starts | vain; then give_up; fi
    echo "requeued: $(told | grep . || echo "ended before training began, after $(passed) s")"
    exec scontrol requeue "$job" # which ends this shell
}

stop_if_warned() { # before it trained
    [ -z "$warned" ] || { requeue; exit 1; }
}

[ -e pretrain_gpt.py ] || refuse "submit from the folder of pretrain_gpt.py (sbatch --chdir): $PWD"
if [ -e .venv/bin/activate ]; then . .venv/bin/activate; fi
export PATH=$PWD/scripts/slurm:$PATH # for the torchrun that is there
mkdir -p "${LOGS:-logs}"
logs=$(realpath "${LOGS:-logs}")
status=$logs/$SLURM_JOB_ID.status
earlier=$logs/$SLURM_JOB_ID.starts # what each start of this job found: the status of the one before
told >>"$earlier"
if grep -qs '^{"state": ' "$status"; then rm "$status"; fi # another file of that name is refused by the run
if tail -n +2 "$earlier" | vain; then give_up; fi

arguments=("$@" "launch.status_file='${status//\'/\\\'}'") # quoted for Hydra
# The line of an array's task in the file $POINTS holds the arguments that are its own.
if [ -n "${SLURM_ARRAY_TASK_ID-}" ] && [ -n "${POINTS-}" ]; then
    line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$POINTS")
    words=$(xargs printf '%s\n' <<<"$line") && [ -n "$words" ] ||
        refuse "line $SLURM_ARRAY_TASK_ID of $POINTS has no arguments, or a quote without its partner: $line"
    mapfile -t own <<<"$words"
    arguments+=("${own[@]}")
fi

# What submits the job again: the end of its log tells it.
quoted() { # for a shell, where that is needed
    local word
    for word; do
        [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
        MEGALITE_COMMAND+=$word' '
    done
}
export MEGALITE_COMMAND=
for name in POINTS TRAIN_NODES RANKS_PER_NODE MAX_RESTARTS LOGS SRUN_OPTIONS RUN_IN MASTER_ADDR OMP_NUM_THREADS; do
    [ -z "${!name-}" ] || { [ "$MEGALITE_COMMAND" ] || quoted env; quoted "$name=${!name}"; }
done
nodes=${SLURM_JOB_NUM_NODES-} time=$(of_job TimeLimit '[0-9][^ ]*') command=$(of_job Command '.* WorkDir=')
quoted sbatch ${nodes:+"--nodes=$nodes"} ${SLURM_NTASKS_PER_NODE:+"--ntasks-per-node=$SLURM_NTASKS_PER_NODE"} \
    ${SLURM_GPUS_PER_NODE:+"--gpus-per-node=$SLURM_GPUS_PER_NODE"} ${time:+"--time=$time"} \
    ${SLURM_JOB_PARTITION:+"--partition=$SLURM_JOB_PARTITION"} ${SLURM_JOB_ACCOUNT:+"--account=$SLURM_JOB_ACCOUNT"} \
    ${SLURM_ARRAY_TASK_ID:+"--array=$SLURM_ARRAY_TASK_ID"}
command=${command% WorkDir=} # the script and its arguments
command=${command%"${*:+ $*}"}
quoted "${command#"$PWD/"}" "$@"
MEGALITE_COMMAND=${MEGALITE_COMMAND% }

# Where ranks meet: the job's first node, and a port that no other of the 20,000 newest jobs has.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}
port=$((12000 + SLURM_JOB_ID * 31 % 20000))
ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
read -r -a srun_options <<<"${SRUN_OPTIONS-}"
read -r -a run_in <<<"${RUN_IN-}"

# Where there are more nodes than the run needs, the best $TRAIN_NODES by the preflight train.
if [ -n "${TRAIN_NODES-}" ]; then
    folder=runs/of-this-job # of which the parent holds the checkpoints
    for word in "$@"; do [[ $word != run_dir=* ]] || folder=${word#run_dir=}; done
    folder=$(dirname "${folder//[\'\"]/}")
    # A rank that hangs is named by the others, and killed 180 s after the first of them has ended.
    looks=(--wait 180 --overcommit --ntasks "$((SLURM_NNODES * ranks_per_node))" --ntasks-per-node "$ranks_per_node")
    list=$(srun "${looks[@]}" ${srun_options[@]+"${srun_options[@]}"} ${run_in[@]+"${run_in[@]}"} \
        python -m megalite preflight --folder "$folder" --keep "$TRAIN_NODES" | tail -n 1) && code=0 || code=$?
    was_told "$code"
    stop_if_warned
    [ -n "$list" ] && [ "$code" -le 1 ] || refuse "preflight: it ended with status $code and chose no nodes"
    [ "$code" = 0 ] || echo "preflight: not all of $list are well" >&2
    tasks=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-$SLURM_NNODES} / SLURM_NNODES))}
    srun_options+=(--nodes "$TRAIN_NODES" --ntasks "$((TRAIN_NODES * tasks))" --nodelist "$list")
    export SLURM_NNODES=$TRAIN_NODES MASTER_ADDR=${list%%,*}
fi

train() {
    local code=0
    stop_if_warned
    "$@" &
    until wait $! && code=0 || code=$? && ! kill -0 $! 2>/dev/null; do :; done # a trap ends `wait`, too
    was_told "$code"
    case $(told)${warned:+, warned} in
        *'"finished"'*) code=0 ;;
        # Warned before it trained, or ended by SLURM while it saved: nothing but steps since the last save is lost.
        *'"stopped"'* | *'"running"'*,\ warned | ,\ warned) requeue; code=$((code ? code : 1)) ;;
        *) code=$((code ? code : 1)) ;;
    esac
    rm -f "$earlier"
    exit "$code"
}
