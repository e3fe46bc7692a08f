# Sourced by quickstart.sh and test.sh: makes .venv with the pinned requirements, or returns at once when it is there.
# usage: . scripts/setup.sh REQUIREMENTS...   (must be sourced from the repository's root)

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

install_requirements() {
    local stamp=".venv/.installed-$(cat "$@" pyproject.toml | cksum | tr ' ' '-')"
    [ -e "$stamp" ] && return
    if [ ! -x .venv/bin/python ]; then
        local python
        python=$(find_python) || return 1
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            echo "Python's venv module does not work; on Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    echo "Installing pinned requirements into .venv (once; torch is large) ..."
    local arguments=()
    for file in "$@"; do arguments+=(-r "$file"); done
    # torch first and alone: a resolver that sees a wheel that is already installed asks for no other build of it
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' requirements.txt)" &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 "${arguments[@]}" &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . || return 1
    touch "$stamp"
}

install_requirements "$@" || exit 1
