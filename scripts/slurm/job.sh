# Sourced by the batch scripts of this folder: what a job does before, around and after its training.
#
# SLURM announces the end of a job (its time limit, a preemption) to this shell, by USR1 (#SBATCH --signal=B:USR1@...),
# to the ranks by TERM, or to both. `train COMMAND ...` runs the command, passes USR1 on to the ranks, which finish their
# step and save, and puts the job back into the queue. The status file that rank 0 writes says what became of the run:
# torchrun's exit status is 1 even where all ranks ended in order.

[ -e pretrain_gpt.py ] || { echo "submit from the folder of pretrain_gpt.py (sbatch --chdir): $PWD" >&2; exit 2; }
if [ -e .venv/bin/activate ]; then . .venv/bin/activate; fi
mkdir -p "${LOGS:-logs}"
logs=$(realpath "${LOGS:-logs}")
status=$logs/$SLURM_JOB_ID.status
rm -f "$status" # of an earlier start of this job

arguments=("$@" "launch.status_file=$status")
# The line of an array's task in the file $POINTS holds the arguments that are its own.
if [ -n "${SLURM_ARRAY_TASK_ID-}" ] && [ -n "${POINTS-}" ]; then
    mapfile -t own < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$POINTS" | xargs printf '%s\n')
    arguments+=("${own[@]}")
fi

# Where ranks meet: the job's first node, and a port that no other of the 20,000 newest jobs has.
export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
port=$((12000 + SLURM_JOB_ID * 31 % 20000))
ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

# Of more nodes than the run needs, $TRAIN_NODES train: the best by the preflight.
nodes=()
if [ -n "${TRAIN_NODES-}" ]; then
    read -r -a look_in <<<"${RUN_IN-}"
    looks=(--overcommit --ntasks "$((SLURM_NNODES * ranks_per_node))" --ntasks-per-node "$ranks_per_node")
    list=$(srun "${looks[@]}" ${look_in[@]+"${look_in[@]}"} python scripts/preflight.py --keep "$TRAIN_NODES" |
        tail -n 1) || echo "preflight: not all of $list are well" >&2
    nodes=(--nodes "$TRAIN_NODES" --ntasks "$((TRAIN_NODES * SLURM_NTASKS_PER_NODE))" --nodelist "$list")
    export SLURM_NNODES=$TRAIN_NODES MASTER_ADDR=${list%%,*}
fi

warned=
warn() { # the ranks alone, not this shell
    warned=yes
    scancel --signal=USR1 "$SLURM_JOB_ID"
}
trap warn USR1
trap 'warned=yes' TERM # the ranks have got it, too

state_of_run() { sed -n 's/^{"state": "\([a-z]*\)".*/\1/p' "$status" 2>/dev/null; }

state_of_job() { scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z]*\).*/\1/p'; }

train() {
    local code=0
    "$@" &
    until wait $! && code=0 || code=$? && ! kill -0 $! 2>/dev/null; do :; done # a trap ends `wait`, too
    case "$(state_of_run)${warned:+, warned}" in
        finished*) exit 0 ;;
        # Warned before it trained, or ended by SLURM while it saved: nothing but steps since the last save is lost.
        stopped* | running,\ warned | ,\ warned)
            # A job that was cancelled must not come again.
            if [ "$(state_of_job)" = RUNNING ]; then
                echo "requeued: $(cat "$status" 2>/dev/null)"
                exec scontrol requeue "$SLURM_JOB_ID" # which ends this shell
            fi
            ;;
    esac
    exit "$((code ? code : 1))"
}
