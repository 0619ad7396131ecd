# Says what a node sees of a checkpoint. $1 is its directory, $2 the directory for what may be remade; the names of the
# files to look at come on stdin, one a line. One line each, separated by tabs:
#   place   WHICH FILESYSTEM SOURCE OPTIONS        of the checkpoint's and the other directory
#   file    NAME SIZE SHA256-OF-BEGINNING SHA256-OF-END
#   bad     NAME REASON
# The beginning is a safetensors header, else 4 KiB; the end is 4 KiB.
set -u
LC_ALL=C
export LC_ALL
directory=$1

place() {
  there=$2
  while [ ! -e "$there" ] && [ "$there" != / ]; do there=$(dirname -- "$there"); done
  kind=$(df --output=fstype -- "$there" 2>/dev/null | tail -n 1)
  from=$(df --output=source -- "$there" 2>/dev/null | tail -n 1)
  at=$(df --output=target -- "$there" 2>/dev/null | tail -n 1)
  options=
  while read -r _ target _ found _; do
    if [ "$(printf '%b' "$target")" = "$at" ]; then options=$found; fi
  done </proc/self/mounts
  printf 'place\t%s\t%s\t%s\t%s\n' "$1" "$kind" "$from" "$options"
}

bad() { printf 'bad\t%s\t%s\n' "$1" "$2"; }

sum() { sha256sum | { read -r digest _; printf '%s' "$digest"; }; }

look() {
  path=$directory/$1
  if ! size=$(stat -L -c %s -- "$path" 2>&1); then
    if [ -L "$path" ]; then bad "$1" "is a link to $(readlink -- "$path"), which is not there"; return; fi
    bad "$1" "${size##*: }"
    return
  fi
  if [ ! -f "$path" ]; then bad "$1" "is no file"; return; fi
  length=4096
  case $1 in
  *.safetensors)
    length=$(od -A n -t u8 -N 8 -- "$path" 2>&1) || { bad "$1" "${length##*: }"; return; }
    length=$(($(printf '%s' "$length" | tr -d ' ') + 8)) 2>/dev/null || length=0
    if [ "$length" -lt 8 ] || [ "$length" -gt 100000008 ] || [ "$length" -gt "$size" ]; then length=4096; fi
    ;;
  esac
  if ! said=$({ head -c 1 -- "$path" && tail -c 1 -- "$path"; } 2>&1 >/dev/null); then bad "$1" "${said##*: }"; return; fi
  first=$(head -c "$length" -- "$path" | sum)
  last=$(tail -c 4096 -- "$path" | sum)
  printf 'file\t%s\t%s\t%s\t%s\n' "$1" "$size" "$first" "$last"
}

place checkpoint "$directory"
place cache "$2"
while IFS= read -r name; do look "$name"; done
