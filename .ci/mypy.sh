#!/usr/bin/env bash
# Type-checks the three folders as the package they install as, and the scripts in bench/ with what
# they import of tests/. mypy does not follow an editable install that maps folders to other names, so
# it is shown a tree of symlinks with the real names.
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

what=(-p mlx_troupe)
for script in bench/*.py; do
    what+=(-m "$(basename "$script" .py)")
done

# From inside the tree: in the root, the folder http would stand beside the standard library's.
cd "$tree"
status=0
out=$(MYPYPATH=$tree:$tree/bench:$tree/tests "$mypy" --config-file "$root/pyproject.toml" \
    --cache-dir "$root/.mypy_cache" --namespace-packages --explicit-package-bases "${what[@]}" 2>&1) \
    || status=$?
echo "$out" | sed 's|^mlx_troupe/||'
exit $status
