#!/usr/bin/env bash
# Set everything up, then test. Arguments go to pytest: scripts/test.sh -k resume; --full adds the long matrices.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh requirements.txt requirements-test.txt
exec .venv/bin/python -m pytest "$@"
