#!/usr/bin/env bash
# Make a virtual environment and install Bessemer into it: setup.sh PYTHON VENV EXTRAS
set -euo pipefail
python=$1 venv=$2 extras=$3
cd "$(dirname "$0")/.."

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
  echo "setup: $python is $("$python" --version 2>&1 || echo missing); Bessemer needs Python 3.11 to 3.13 (make PYTHON=python3.12 ...)." >&2
  exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq python3-venv
  else
    echo 'setup: Python cannot make virtual environments here; install the Debian package python3-venv (as root).' >&2
    exit 1
  fi
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip 'setuptools>=77' wheel
"$venv/bin/python" -m pip install --quiet --no-build-isolation -e ".[$extras]"
