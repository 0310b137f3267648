#!/usr/bin/env bash
# Makes sure that there is a Chromium for the tests of HTML pages: one that is installed, else
# Playwright's own, else the system's package. Safe to repeat; quick when there is one. Without any
# browser the tests that need one are skipped and say so; this script then ends with status 1.
#
#   VENV=…  the virtual environment that has playwright (.venv)
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
say() { echo "browser: $*" >&2; }

for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
  if path=$(command -v "$name") && "$path" --version >/dev/null 2>&1; then
    exit 0
  fi
done

# Playwright's own counts only if it starts: it may lack libraries of the system.
starts() {
  "$VENV/bin/python" - >/dev/null 2>&1 <<'PYTHON'
from playwright.sync_api import sync_playwright

with sync_playwright() as playwright:
    playwright.chromium.launch().close()
PYTHON
}

if [ -x "$VENV/bin/python" ]; then
  if starts; then exit 0; fi
  say "asking Playwright for its Chromium"
  if timeout 300 "$VENV/bin/python" -m playwright install chromium-headless-shell >/dev/null 2>&1 &&
    starts; then
    exit 0
  fi
fi

as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
if command -v apt-get >/dev/null; then
  say "installing the system's Chromium"
  "${as_root[@]}" apt-get update -qq >&2 || say "the list of packages could not be refreshed"
  for package in chromium-headless-shell chromium; do
    if DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -qq -y \
      --no-install-recommends "$package" fonts-dejavu-core >&2; then
      exit 0
    fi
  done
fi
say "no Chromium could be installed: tests of HTML pages will be skipped"
exit 1
