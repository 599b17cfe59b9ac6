#!/bin/sh
# Makes .venv and installs Baton into it, or brings it up to date with pyproject.toml.
#   venv.sh runtime    what `baton up` needs
#   venv.sh dev        that, the tools that check it, and UCX
# PYTHON picks the interpreter; TORCH_INDEX the package index that torch comes from (else pip's own).
set -eu
cd "$(dirname "$0")/.."

set_name=${1:?runtime or dev}
venv=.venv
case $set_name in
    runtime) requirement=. ;;
    dev) requirement='.[dev,ucx]' ;;
    *) echo "venv.sh: unknown set $set_name; known: runtime, dev" >&2; exit 2 ;;
esac

fail() {
    printf '\nbaton: %s\n' "$1" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer${PYTHON:+, which $PYTHON is not}. Install it, or name it: make up PYTHON=/path/to/python3"
}

pip_install() {
    # Few retries: without a network the message below should not take minutes to come.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --retries 2 "$@" || fail "pip could not install $requirement; its own message is above.
  No network, or a proxy or an own package index? pip must reach one: see 'pip config list', PIP_INDEX_URL, HTTPS_PROXY.
  Little disk? 'df -h .' should show 3 GB. Then run the same command again: it goes on where it stopped."
}

# A venv whose interpreter is gone or that was moved here from elsewhere is made anew.
if [ -e "$venv" ] && ! { new_enough "$venv/bin/python" && [ "$(cat "$venv/.place" 2>/dev/null)" = "$PWD" ]; }; then
    [ -e "$venv/pyvenv.cfg" ] || fail "$PWD/$venv exists and is no virtual environment; move it away"
    echo "baton: $venv does not work here any more; making it anew"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$(find_python)
    echo "baton: making $venv with $("$python" --version) and installing into it (once)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        fail "$python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"
    fi
    echo "$PWD" >"$venv/.place"
fi
rm -f "$venv/.runtime" "$venv/.dev"

# The kernels need nothing that is installed below: they compile while it downloads.
echo "baton: compiling the kernels for this CPU beside the installation (once, half a minute of two cores)"
"$venv/bin/python" -m common.native.build &
kernels=$!

# torch first and alone, for it may come from an index of its own.
torch=$("$venv/bin/python" -c 'import tomllib
print(next(d for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if d.startswith("torch==")))')
if ! "$venv/bin/python" -m pip show torch 2>/dev/null | grep -q "^Version: ${torch#torch==}\(+.*\)\{0,1\}$"; then
    if [ -n "${TORCH_INDEX:-}" ]; then
        echo "baton: installing $torch from $TORCH_INDEX"
        pip_install --index-url "$TORCH_INDEX" "$torch"
    else
        echo "baton: installing $torch from pip's index (CPU build: about 200 MB to download, a minute or two)."
        echo "baton: PyPI itself has a CUDA build of several GB for Linux on x86-64; Ctrl-C and 'make up TORCH_INDEX=...' take the CPU build (see README)."
        pip_install "$torch"
    fi
fi
echo "baton: installing the rest (about 100 MB to download; with the developers' tools, UCX and Triton about 550 MB)"
pip_install -e "$requirement"

# What pip would do with one core, on all of them, and without the libraries' own tests; some of their files are no Python.
"$venv/bin/python" -m compileall -qq -j 0 -x '[/\\]tests?[/\\]' "$venv/lib" || true

wait "$kernels" || fail "the kernels could not be compiled (see above)"

touch "$venv/.runtime"
if [ "$set_name" = dev ]; then touch "$venv/.dev"; fi
