#!/usr/bin/env bash
# Lint, check types and run the tests. Arguments go to pytest: bash scripts/test.sh tests/state -k digest
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh" dev
cd "$root"
bin="$root/.venv/bin"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
# Tests on several ranks share the cores with each other: one thread a process is fastest.
export OMP_NUM_THREADS=1
exec "$bin/python" -m pytest -n 2 "$@"
