# Sourced by tools/demo, tools/test and .ci/run: a Python environment with mergefs in it, and FUSE.
#
#   prepare_fuse                 fusermount3, by apt-get when root; otherwise says what is missing and goes on
#   prepare_strace               strace likewise, by which tests see what reaches the disk
#   prepare_python EXTRA,EXTRA   the active virtual environment, or .venv in the repository's root, with mergefs
#
# Says nothing but what it begins to install, and what went wrong.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=torch==2.13.0

say() {
    echo "$*" >&2
}

# Run a command, showing what it printed only when it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || status=$?
    [ "$status" -eq 0 ] || cat "$log" >&2
    rm -f "$log"
    return "$status"
}

# Install Debian packages; false where that is impossible.
install_packages() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    say "Installing $* ..."
    quietly apt-get -qq update || true
    DEBIAN_FRONTEND=noninteractive quietly apt-get -qq install --yes --no-install-recommends "$@"
}

prepare_fuse() {
    command -v fusermount3 >/dev/null || install_packages fuse3 ||
        say "fusermount3 is missing: install your system's fuse3 package to mount models; going on without."
}

prepare_strace() {
    command -v strace >/dev/null || install_packages strace ||
        say "strace is missing: install it to run the tests of crashes; going on without."
}

# The first Python that is new enough.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "Python 3.11 or newer is needed and was not found."
    return 1
}

# Make a virtual environment; Debian keeps what that needs in a package of its own.
create_environment() {
    local python module=venv
    python=$(find_python) || return
    say "Creating $1 ..."
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null && ! install_packages python3-venv; then
        module=virtualenv
        "$python" -m virtualenv --version >/dev/null 2>&1 ||
            "$python" -m pip install --quiet --user virtualenv >/dev/null 2>&1 || {
            say "Python cannot make virtual environments here: install your system's python3-venv package."
            return 1
        }
    fi
    quietly "$python" -m "$module" "$1" || {
        rm -rf "$1"
        return 1
    }
}

prepare_python() {
    local extras=$1 stamp wanted
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        [ -x "$ROOT/.venv/bin/pip" ] || create_environment "$ROOT/.venv" || return
        # shellcheck disable=SC1091
        . "$ROOT/.venv/bin/activate"
    fi
    if ! python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
        say "Installing $TORCH ..."
        quietly python -m pip install --quiet "$TORCH" || return
    fi
    # Asking pip takes seconds, so it is asked again only when the requirements have changed.
    stamp=$VIRTUAL_ENV/.mergefs-$extras
    wanted="$ROOT $(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "Installing mergefs[$extras] ..."
        quietly python -m pip install --quiet --editable "$ROOT[$extras]" || return
        echo "$wanted" >"$stamp"
    fi
}
