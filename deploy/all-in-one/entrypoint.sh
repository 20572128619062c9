#!/bin/sh
# pagoda serve with the model of the command line or of PAGODA_MODEL; else with the one that is mounted at /mnt/models;
# else with the embedded one.
set -eu
if [ -z "${PAGODA_MODEL:-}" ] && [ -e /mnt/models/config.json ]; then
    export PAGODA_MODEL=/mnt/models
fi
exec pagoda serve "$@"
