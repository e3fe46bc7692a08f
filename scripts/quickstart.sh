#!/usr/bin/env bash
# Set everything up, then train the embedded default. Arguments are overrides: scripts/quickstart.sh train.steps=50
set -euo pipefail
started_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh requirements.txt
root=$PWD
cd "$started_in" # where relative paths in ARGS, and runs/, belong
exec "$root/.venv/bin/python" "$root/pretrain_gpt.py" "$@"
