#!/usr/bin/env bash
# Type-checks the three folders as the package they install as and the scripts in bench/, strictly,
# and at the same time tests/, by mypy-tests.ini. mypy does not follow an editable install that maps
# folders to other names, so it is shown a tree of symlinks with the real names.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
mypy=${1:-.venv/bin/mypy}
case $mypy in /*) ;; */*) mypy=$root/$mypy ;; esac

tree=$root/.mypy_cache/tree
rm -rf "$tree"
mkdir -p "$tree/mlx_troupe"
for folder in runtime actors http; do
    ln -s "$root/$folder" "$tree/mlx_troupe/$folder"
done
ln -s "$root/bench" "$root/tests" "$tree"
export MYPYPATH=$tree:$tree/bench:$tree/tests

# check CONFIG CACHE FOLDER ARGUMENT…: the modules in the folder, and what else the arguments name.
check() {
    local config=$1 cache=$2 folder=$3 what=() file
    shift 3
    for file in "$root/$folder"/*.py; do
        what+=(-m "$(basename "$file" .py)")
    done
    # From inside the tree: in the root, the folder http would stand beside the standard library's.
    cd "$tree"
    "$mypy" --config-file "$config" --cache-dir "$cache" --namespace-packages \
        --explicit-package-bases "${what[@]}" "$@" 2>&1
}

status=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
check "$root/.ci/mypy-tests.ini" "$root/.mypy_cache/tests" tests >"$log" &
strict=$(check "$root/pyproject.toml" "$root/.mypy_cache" bench -p mlx_troupe) || status=$?
wait $! || status=$?
{ echo "$strict"; cat "$log"; } | sed 's|^mlx_troupe/||'
exit $status
