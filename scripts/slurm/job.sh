# Sourced by the batch scripts of this folder: what a job does before, around and after its training.
#
# SLURM announces the end of a job (its time limit, a preemption) to this shell, by USR1 (#SBATCH --signal=B:USR1@...),
# to the ranks by TERM, or to both. `train COMMAND ...` runs the command, passes USR1 on to the ranks, which finish their
# step and save, and puts the job back into the queue. The status file that rank 0 writes says what became of the run:
# torchrun's exit status is 1 even where all ranks ended in order.

# The last task of an array has the array's own number as SLURM_JOB_ID, by which SLURM would signal and requeue all tasks.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

warned=
warn() { # the ranks alone, not this shell
    warned=yes
    scancel --signal=USR1 "$job" || echo "no rank could be told of the end" >&2
}
trap warn USR1
trap 'warned=yes' TERM # the ranks have got it, too

refuse() {
    echo "$*" >&2
    exit 2
}

state_of_run() { sed -n 's/^{"state": "\([a-z]*\)".*/\1/p' "$status" 2>/dev/null; }

state_of_job() { scontrol show job --oneliner "$job" | sed -n 's/.* JobState=\([A-Z]*\).*/\1/p'; }

requeue() { # unless the job was cancelled: then it must not come again
    [ "$(state_of_job)" = RUNNING ] || return 0
    echo "requeued: $(cat "$status" 2>/dev/null)"
    exec scontrol requeue "$job" # which ends this shell
}

stop_if_warned() { # before it trained
    [ -z "$warned" ] || { requeue; exit 1; }
}

[ -e pretrain_gpt.py ] || refuse "submit from the folder of pretrain_gpt.py (sbatch --chdir): $PWD"
if [ -e .venv/bin/activate ]; then . .venv/bin/activate; fi
mkdir -p "${LOGS:-logs}"
logs=$(realpath "${LOGS:-logs}")
status=$logs/$SLURM_JOB_ID.status
rm -f "$status" # of an earlier start of this job

arguments=("$@" "launch.status_file='${status//\'/\\\'}'") # quoted for Hydra
# The line of an array's task in the file $POINTS holds the arguments that are its own.
if [ -n "${SLURM_ARRAY_TASK_ID-}" ] && [ -n "${POINTS-}" ]; then
    line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$POINTS")
    words=$(xargs printf '%s\n' <<<"$line") && [ -n "$words" ] ||
        refuse "line $SLURM_ARRAY_TASK_ID of $POINTS has no arguments, or a quote without its partner: $line"
    mapfile -t own <<<"$words"
    arguments+=("${own[@]}")
fi

# Where ranks meet: the job's first node, and a port that no other of the 20,000 newest jobs has.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}
port=$((12000 + SLURM_JOB_ID * 31 % 20000))
ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
read -r -a srun_options <<<"${SRUN_OPTIONS-}"
read -r -a run_in <<<"${RUN_IN-}"

# Of more nodes than the run needs, $TRAIN_NODES train: the best by the preflight.
if [ -n "${TRAIN_NODES-}" ]; then
    folder=runs/of-this-job # of which the parent holds the checkpoints
    for word in "$@"; do [[ $word != run_dir=* ]] || folder=${word#run_dir=}; done
    folder=$(dirname "${folder//[\'\"]/}")
    # A rank that hangs is named by the others, and killed 180 s after the first of them has ended.
    looks=(--wait 180 --overcommit --ntasks "$((SLURM_NNODES * ranks_per_node))" --ntasks-per-node "$ranks_per_node")
    list=$(srun "${looks[@]}" ${srun_options[@]+"${srun_options[@]}"} ${run_in[@]+"${run_in[@]}"} \
        python scripts/preflight.py --folder "$folder" --keep "$TRAIN_NODES" | tail -n 1) && code=0 || code=$?
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
    case "$(state_of_run)${warned:+, warned}" in
        finished*) exit 0 ;;
        # Warned before it trained, or ended by SLURM while it saved: nothing but steps since the last save is lost.
        stopped* | running,\ warned | ,\ warned) requeue ;;
    esac
    exit "$((code ? code : 1))"
}
