#!/usr/bin/env bash
# Checks and measurements that need a GPU: kernels, steps, serving, planned and actual memory, parity, peers.
# Takes under 15 minutes. A part that fails or hangs costs only itself, and the result is written after every part.
# Works from a plain checkout and installs or downloads nothing. Without a GPU it says so and exits with 0.
#
#   tests/gpu/run.sh [--dry-run] [--parts kernels,steps] [RESULT.json]      default: $OUT/gpu.json, else no file
#
# --dry-run runs the parts on the CPU with tiny sizes. --parts runs only these (see PARTS in gpu_suite/part.py).
# PYTHON names the interpreter (default: python3).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

# The import names are llmsched.*, unlike the folder names. The root must stay off the path, because transformers
# takes a top-level module called `kernels` for a package of that name.
names=$(mktemp -d)
trap 'rm -rf "$names"' EXIT
mkdir "$names/llmsched"
for part in cli engine kernels profiles; do
    ln -s "$root/$part" "$names/llmsched/$part"
done

export PYTHONPATH="$names:$here:$root/tests/support:$root/tests/kernels"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
"${PYTHON:-python3}" -P -m gpu_suite "$@"
