#!/usr/bin/env bash
# Set everything up, then test. Arguments go to pytest: scripts/test.sh -k resume; --full adds the long matrices.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh requirements.txt requirements-test.txt
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 # ranks x threads stay under the cores; nothing is fetched
selection=(-m "not long")
arguments=()
for argument in "$@"; do
    if [ "$argument" = --full ]; then selection=(); else arguments+=("$argument"); fi
done
exec .venv/bin/python -m pytest "${selection[@]}" "${arguments[@]}"
