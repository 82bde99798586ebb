#!/usr/bin/env bash
# Type-checks the three folders as the package they install as. mypy does not follow an editable
# install that maps folders to other names, so it is shown a tree of symlinks with the real names.
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

# From inside the tree: in the root, the folder http would stand beside the standard library's.
cd "$tree"
status=0
out=$(MYPYPATH=$tree "$mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" \
    --namespace-packages --explicit-package-bases -p mlx_troupe 2>&1) || status=$?
echo "$out" | sed 's|^mlx_troupe/||'
exit $status
