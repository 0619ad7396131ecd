# Prints this machine's memory every $1 seconds, one line a sample, until nobody reads any more.
#
# A line is the time since boot in seconds, then the first lines of /proc/meminfo with semicolons between them. Nothing
# is started and nothing written: bash reads two small files and sleeps.

# A pipe that nobody writes to: reading from it with a time limit is a sleep without a process.
exec {never}<> <(:)
while read -r up _ </proc/uptime; do
  mapfile -t -n 48 lines </proc/meminfo
  [ "${#lines[@]}" -gt 0 ] || { echo 'there is no /proc/meminfo' >&2; exit 1; }
  printf -v line '%s;' "$up" "${lines[@]}"
  printf '%s\n' "${line%;}" || exit 0
  read -r -t "$1" -u "$never" _
done
