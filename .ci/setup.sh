#!/usr/bin/env bash
# Makes .venv and puts the project into it: `setup.sh runtime`, then `setup.sh test` for the rest.
# Called by the Makefile when a stamp is older than pyproject.toml. Needs no root. Bash 3.2 will do.
set -euo pipefail
cd "$(dirname "$0")/.."

stage=${1:?runtime or test}
venv=.venv
bin=$venv/bin

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# The first interpreter that really runs (a pyenv shim may not) and is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3"
}

find_mlx() {
    if [ -n "${MLX:-}" ]; then
        case $MLX in cpu|cuda|metal) echo "$MLX" ;; *) die "MLX=$MLX: must be cpu, cuda or metal" ;; esac
    elif [ "$(uname -s)" = Darwin ]; then
        echo metal
    elif command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

# Debian's python3 comes without ensurepip unless python3-venv is there: then pip or uv can still do it.
make_venv() {
    local python=$1
    rm -rf "$venv"
    "$python" -m venv "$venv" 2>/dev/null && return
    rm -rf "$venv"
    if command -v uv >/dev/null && uv venv --quiet --seed --python "$python" "$venv"; then return; fi
    rm -rf "$venv"
    if "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$venv" \
        && "$python" -m pip --python "$bin/python" install --quiet pip; then return; fi
    rm -rf "$venv"
    die "$python cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv"
}

pip_install() { "$bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# MLX's own CPU build computes matrix products with a slow reference BLAS; the product puts a fast one
# in front of it: MKL where there is one, else the system's OpenBLAS.
fast_blas() {
    local kind
    if [ "$(uname -m)" = x86_64 ]; then
        say "taking mkl from the package index (220 MB): matrix products 20 times faster than MLX's own"
        pip_install mkl || say "mkl cannot be had; going on without it"
    fi
    kind=$("$bin/python" -c 'from mlx_troupe.runtime.engine.blas import ensure_fast_blas
print(ensure_fast_blas().kind)')
    if [ "$kind" = reference ]; then
        say "no fast BLAS: matrix products will be slow. On Debian or Ubuntu:" \
            "sudo apt install libopenblas0-pthread"
    fi
}

runtime() {
    local python mlx
    python=$(find_python)
    mlx=$(find_mlx)
    # Two MLX builds overwrite each other's files: another build means another environment.
    if ! "$bin/python" -c '' 2>/dev/null || [ "$(cat "$venv/.mlx" 2>/dev/null)" != "$mlx" ]; then
        say "making $venv with $("$python" --version) and MLX for $mlx"
        make_venv "$python"
        echo "$mlx" > "$venv/.mlx"
    fi
    say "installing (the first time takes a few minutes)"
    case $mlx in
        metal) pip_install -e . ;;
        cuda) pip_install -e '.[cuda]' ;;
        cpu) pip_install -e . 'mlx[cpu]'; fast_blas ;;
    esac
    touch "$venv/.ready"
}

case $stage in
    runtime) runtime ;;
    test)
        say "installing what the tests need"
        pip_install -e '.[test]'
        touch "$venv/.ready-test" ;;
    *) die "unknown stage: $stage" ;;
esac
