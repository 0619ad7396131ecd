# Lists a checkpoint: its index on the first line as hexadecimal digits (empty without one), then SIZE NAME of every file.
set -eu
cd -- "$1"
if [ -f model.safetensors.index.json ]; then od -A n -v -t x1 model.safetensors.index.json | tr -d ' \n'; fi
printf '\n'
find -L . -maxdepth 3 -type f -printf '%s %P\n'
