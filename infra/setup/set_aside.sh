#!/usr/bin/env bash
# set_aside.sh RUN_DIR SEED: if RUN_DIR holds a run of another seed, renames it, so that RUN_DIR is free for this one.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly run_dir=$1 seed=$2
[ -f "$run_dir/recipe.toml" ] || exit 0
old=$(sed -n 's/^seed = //p' "$run_dir/recipe.toml" | head -1)
[ "$old" = "$seed" ] && exit 0
aside="$run_dir-seed$old"
[ ! -e "$aside" ] || aside="$aside-$(date +%Y%m%d-%H%M%S)"
mv "$run_dir" "$aside"
printf 'demo: the run of seed %s is kept in %s\n' "$old" "$aside"
