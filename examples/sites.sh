#!/usr/bin/env bash
# Three hospitals and a server, as four processes on this machine: TLS, keys, two methods, one report. (make deploy-demo)
# In earnest, each of them runs on a machine of its own; the commands are the same.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/deploy-demo}
port=${PORT:-8443}
export OMP_NUM_THREADS=1
mkdir -p "$out" && cd "$out" && rm -rf data keys state fedavg-ft one-shot report schema.json
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
began=$SECONDS

echo "== Three hospitals with a CSV file each, which stay where they are"
mkdir data
python -c "import sys; sys.path.insert(0, '$here'); import hospitals, pathlib; hospitals.invent(pathlib.Path('data'))"
wc -l data/*.csv

echo "== One of them writes down what the columns are; no sample is in it"
atoll data schema data/Ulm.csv --target readmitted -o schema.json

echo "== The operator makes all keys; everybody gets a folder"
atoll deploy keys -o keys --host 127.0.0.1 --site Ulm --site Porto --site Lund | sed 's/^/   /'

echo "== Each hospital connects"
for site in Ulm Porto Lund; do
    atoll client --server 127.0.0.1:$port --data data/$site.csv --keys keys/sites/$site --state state/$site --stay \
        > "$site.log" 2>&1 &
done

echo "== The server runs FedAvg-FT with them, then a method that needs one upload"
serve() { atoll server --own-schema schema.json --name hospitals --keys keys/server --listen 127.0.0.1:$port "$@"; }
serve --method fedavg-ft --rounds 10 --out fedavg-ft
together=$SECONDS
serve --method oneshot-margins --out one-shot

echo "== Both in one report; scores were computed at the hospitals, and only they left"
atoll report fedavg-ft one-shot --out report
echo "== Their models are at the hospitals"
find state -path '*/models/*' -name '*.safetensors' | sort
echo "== $((SECONDS - began)) s in all, $((together - began)) s until the first method was done"
