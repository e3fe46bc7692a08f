#!/usr/bin/env bash
# Set everything up, then train the embedded default. Arguments are overrides: scripts/quickstart.sh train.steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh requirements.txt
exec .venv/bin/python pretrain_gpt.py "$@"
