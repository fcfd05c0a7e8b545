#!/bin/sh
# Builds docs/ as a site in build-docs/site. Whatever mkdocs warns about, a page that is not in the navigation or a link
# that leads nowhere, is an error. index.html can be opened as a file; the search needs a server, such as
# `python3 -m http.server -d build-docs/site`.
#   --install    first makes build-docs/venv with what it is built with, from PyPI
set -eu
cd "$(dirname "$0")/.."
mkdocs=build-docs/venv/bin/mkdocs
case "${1:-}" in
  "") ;;
  --install)
    python3 -m venv build-docs/venv
    build-docs/venv/bin/pip install -q mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings==1.0.8 \
      mkdocstrings-python==2.0.11 black==26.10.1 ;;
  *) echo "docs.sh: it takes nothing but --install" >&2; exit 1 ;;
esac
[ -x "$mkdocs" ] || { echo "docs.sh: $mkdocs is missing; run tools/docs.sh --install once" >&2; exit 1; }
# Material's makers advertise at every build, on standard error.
NO_MKDOCS_2_WARNING=1 exec "$mkdocs" build --strict --quiet
