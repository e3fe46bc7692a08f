# Sourced by quickstart.sh and test.sh from the repository's root.
# . scripts/setup.sh REQUIREMENTS...   makes .venv with the pinned requirements, or returns at once when it is there
# . scripts/setup.sh --latest          brings .venv-latest to the newest releases that pyproject.toml allows

find_python() {
    for candidate in "${PYTHON:-}" python3.12 python3.13 python3.11 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "megalite needs Python 3.11, 3.12 or 3.13; found: $(python3 --version 2>&1). Set PYTHON=/path/to/python3." >&2
    return 1
}

make_environment() {
    local python
    [ -x "$1/bin/python" ] && return
    python=$(find_python) || return 1
    if ! "$python" -m venv "$1"; then
        rm -rf "$1"
        echo "Python's venv module does not work; on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    fi
}

install_requirements() {
    local stamp=".venv/.installed-$(cat "$@" pyproject.toml | cksum | tr ' ' '-')"
    [ -e "$stamp" ] && return
    make_environment .venv || return 1
    echo "Installing pinned requirements into .venv (once; torch is large) ..."
    local arguments=()
    for file in "$@"; do arguments+=(-r "$file"); done
    # torch first and alone: a resolver that sees a wheel that is already installed asks for no other build of it
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' requirements.txt)" &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 "${arguments[@]}" &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . || return 1
    touch "$stamp"
}

install_latest() {
    local install=".venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade"
    make_environment .venv-latest || return 1
    echo "Installing the newest releases into .venv-latest ..."
    # --all-releases: Hydra, OmegaConf and torch change under us most, so their pre-releases are tried, too
    $install "pip>=26" &&
        $install --upgrade-strategy eager --all-releases hydra-core,omegaconf,torch \
            --editable ".[wandb,tensorboard,s3,test]" &&
        .venv-latest/bin/python -m pip freeze --exclude-editable
}

if [ "$1" = --latest ]; then install_latest; else install_requirements "$@"; fi || exit 1
