#!/usr/bin/env bash
# Set everything up, then test. Arguments go to pytest: scripts/test.sh -k resume; --full adds the long matrices.
# scripts/test.sh --latest ... tests with the newest releases instead of the pinned ones, in .venv-latest.
# Two files are tested at a time: ranks wait for each other much of the time, so that one at a time leaves cores idle.
# In order: the files with the fewest tests are not the shortest, and the last ones run alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --latest ]; then
    shift
    environment=.venv-latest
    . scripts/setup.sh --latest
else
    environment=.venv
    . scripts/setup.sh requirements.txt requirements-wandb.txt requirements-tensorboard.txt requirements-s3.txt requirements-test.txt
fi
exec "$environment/bin/python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
