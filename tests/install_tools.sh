#!/bin/bash
# Fetch what some tests need beside a compiler and Python packages, where it is missing: promtool,
# which evaluates the alert rules, and a browser, which shows the report of `statecache ab`.
#
# usage: tests/install_tools.sh FOLDER
#
# promtool goes into FOLDER, out of the Debian package; the browser is installed, which takes root.
# What cannot be had is said, and is no error: the tests that need it are skipped.
set -euo pipefail

folder=$(cd "$1" && pwd)
browsers=(chromium chromium-browser google-chrome google-chrome-stable) # as in tests/support/browser.py

found() { command -v "$@" >/dev/null; } # any of them

fetch_promtool() {
  local unpacked status
  unpacked=$(mktemp -d)
  chmod 755 "$unpacked" # apt-get downloads as a user of its own
  (cd "$unpacked" && apt-get -q download prometheus &&
    dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool &&
    mv usr/bin/promtool "$folder")
  status=$?
  rm -rf "$unpacked"
  return $status
}

install_chromium() {
  [ "$(id -u)" = 0 ] &&
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends chromium
}

if found promtool && found "${browsers[@]}"; then exit; fi
if [ "$(id -u)" = 0 ] && found apt-get; then apt-get -q update || true; fi
found promtool || fetch_promtool ||
  echo "make: promtool is missing; install it (Debian and Ubuntu: prometheus)" >&2
found "${browsers[@]}" || install_chromium ||
  echo "make: a browser is missing; install one of ${browsers[*]}" >&2
