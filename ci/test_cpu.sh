#!/usr/bin/env bash
# Sets up, then runs every CPU test; arguments go to pytest.
#
#   ci/test_cpu.sh           the suite
#   ci/test_cpu.sh --full    with the long proofs (marked `full`): large files, second environments, repeated kills
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ci/bootstrap.sh cpu
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
selection="not full and not gpu"
if [ "${1:-}" = --full ]; then
  selection="not gpu"
  shift
fi
.venv/bin/ruff check -q .
.venv/bin/ruff format -q --check .
exec .venv/bin/python -m pytest -m "$selection" --durations=15 "$@"
