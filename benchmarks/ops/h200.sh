#!/usr/bin/env bash
# Everything that benchmarks/results/h200/ holds about the operators, on one GPU, in about five minutes:
#
#     benchmarks/ops/h200.sh OUT [OPERATORS]
#
# OUT gets ops.json (every case of every operator, each implementation compared with float64, every peer), numerics.json
# (all kernels against float64 on the small and odd examples), graphs.txt (all of them under torch.compile and in CUDA
# graphs), sanitizer.json (compute-sanitizer over the CUDA C++ kernels), and what each step printed.
# OPERATORS, separated by commas, measures only these, in this order; the rows of others in OUT/ops.json stay. A case
# that OUT/ops.json holds already, measured on such a machine at the same commit, is not measured again. Copy
# benchmarks/results/h200/ops.json to OUT first to bring it up to date, and back after. Each case is written when it
# is done, so a run that is ended early loses only the case it was at.
#
# May be set: STEPS (which of "hardware numerics graphs sanitizer bench" to run; all), CASE (only cases whose name
# contains this), BENCH_SECONDS (for all of ops.json; 300), WORKERS (processes that compile first), PYTHON, and DEVICE
# (cpu is a dry run).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?where to write: benchmarks/ops/h200.sh OUT}
python=${PYTHON:-python3}
device=${DEVICE:-auto}
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 COLUMNS=150
mkdir -p "$out"
failed=0

step() {  # name, seconds, command...
  local name=$1 seconds=$2 begun=$SECONDS
  shift 2
  [[ " ${STEPS:-$name} " == *" $name "* ]] || return 0
  timeout "$seconds" "$@" > "$out/$name.txt" 2>&1
  local code=$?
  [ $code -eq 0 ] || failed=1
  echo "$name: exit $code after $((SECONDS - begun)) s"
}

step hardware 60 "$python" -m transect hardware --device "$device"
# Numerics first: what is wrong need not be timed.
if [ "$device" != cpu ]; then
  step numerics 150 "$python" benchmarks/checks/numerics.py "$out/numerics.json" --workers "${TEST_WORKERS:-8}"
  step graphs 150 "$python" -m pytest -q -p no:cacheprovider -o addopts="" -n "${TEST_WORKERS:-8}" \
    tests/ops/test_torch_integration.py --import-mode=importlib
  step sanitizer 90 "$python" benchmarks/checks/sanitize_cuda.py "$out/sanitizer.json"
fi
step bench ${BENCH_SECONDS:-300} "$python" -m transect bench ops --ops "${2:-}" --case "${CASE:-}" --device "$device" --check \
  --resume --workers "${WORKERS:-14}" --limit 20 --json "$out/ops.json"
tail -n 3 "$out/graphs.txt" "$out/sanitizer.txt" 2> /dev/null
exit $failed
