#!/usr/bin/env bash
# Print the Python to make the environment with: the one named, or the first on the PATH from 3.11 to 3.13 that can make one.
set -euo pipefail

fits='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
for python in "${1:-python3}" python3.13 python3.12 python3.11; do
  if "$python" -c "$fits" >/dev/null 2>&1; then
    command -v "$python"
    exit 0
  fi
  if [[ -n ${1:-} ]]; then
    echo "$1 is no Python from 3.11 to 3.13 with its venv module." >&2
    exit 1
  fi
done
echo "No Python from 3.11 to 3.13 with its venv module found. On Debian or Ubuntu: apt-get install python3 python3-venv. Or name one: make ... PYTHON=/path/to/python" >&2
exit 1
