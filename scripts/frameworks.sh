#!/usr/bin/env bash
# Make an environment with the training frameworks of scripts/frameworks.txt on top of the one named: it sees all packages of that one, torch
# and Holdfast included, and holds the frameworks and what else they need. Print its interpreter. Takes a minute, and 1.5 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."

base=${1:-.venv}
place=build/frameworks
wanted="$(cksum <scripts/frameworks.txt) $("$base/bin/python" -c 'import sys; print(sys.version)')"
if [[ $(cat "$place/.made" 2>/dev/null) != "$wanted" ]]; then
  rm -rf "$place"
  "$base/bin/python" -m venv --without-pip "$place"
  packages=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # addsitedir and not the bare path: that also reads the .pth files there, as an editable install has one
  echo "import site; site.addsitedir('$packages')" >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  grep '^torch==' constraints.txt >"$place/constraints.txt"
  PIP_CONSTRAINT="$place/constraints.txt" "$base/bin/python" -m pip --disable-pip-version-check --python "$place/bin/python" \
    install -qq -r scripts/frameworks.txt >&2
  echo "$wanted" >"$place/.made"
fi
echo "$place/bin/python"
