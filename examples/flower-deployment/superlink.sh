#!/usr/bin/env bash
# The SuperLink, with TLS; only nodes whose key was registered may connect. Environment: see environment.sh.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
# It keeps registrations and messages in memory: with a file (DATABASE=...), Flower 1.41 answers "database is locked"
# when the machine is busy, at which nodes end. After a restart, run register.sh again.
exec flower-superlink --host "${LISTEN:-$HOST}" --port "$PORT" ${DATABASE:+--database "$DATABASE"} \
  --ssl-ca-certfile "$KEYS/ca.crt" --ssl-certfile "$KEYS/server.crt" --ssl-keyfile "$KEYS/server.key" \
  --enable-supernode-auth --disable-runtime-dependency-installation
