#!/usr/bin/env bash
# The SuperLink, with TLS; only nodes whose key was registered may connect. Environment: see environment.sh.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p "$STATE"
exec flower-superlink --host "${LISTEN:-$HOST}" --port "$PORT" --database "$STATE/superlink.db" \
  --ssl-ca-certfile "$KEYS/ca.crt" --ssl-certfile "$KEYS/server.crt" --ssl-keyfile "$KEYS/server.key" \
  --enable-supernode-auth --disable-runtime-dependency-installation
