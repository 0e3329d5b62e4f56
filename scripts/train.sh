#!/usr/bin/env bash
# Train the example. Arguments are its flags: bash scripts/train.sh --help
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh" plot
exec "$root/.venv/bin/python" "$root/examples/lm.py" "$@"
