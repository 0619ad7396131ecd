# Gives memory of cached files back, and makes large pieces of what is free. $1 is the checkpoint's directory.
#
# Root, or whoever may become it without a password, drops all that is cached and asks the kernel to compact. Others
# drop what is cached of the checkpoint's files, which is what loading fills memory with. Prints which of both was done.

drop='echo 1 >/proc/sys/vm/drop_caches && { echo 1 >/proc/sys/vm/compact_memory; } 2>/dev/null || true'
if [ "$(id -u)" -eq 0 ] && [ -w /proc/sys/vm/drop_caches ]; then
  bash -c "$drop" && { echo 'all caches'; exit 0; }
fi
if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  sudo -n bash -c "$drop" 2>/dev/null && { echo 'all caches'; exit 0; }
fi
shopt -s nullglob
files=("$1"/*.safetensors)
for file in "${files[@]}"; do
  # Of no bytes at all: dd then advises the kernel that the whole file is not needed.
  dd if="$file" iflag=nocache count=0 status=none || exit 1
done
echo "the checkpoint's ${#files[@]} shards"
