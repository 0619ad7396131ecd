# Whether packets pass from $1 to $2, and whether they pass whole with $3 bytes of payload. Sends a handful of packets.
#
# Prints what ping says of small ones, a line `code N`, what it says of whole ones, a line `code N`.

LC_ALL=C
export LC_ALL
command -v ping >/dev/null || { echo 'there is no program ping' >&2; exit 1; }
ping -n -q -c 5 -i 0.2 -W 1 -I "$1" "$2" 2>&1
echo "code $?"
ping -n -q -c 2 -i 0.2 -W 1 -M 'do' -s "$3" -I "$1" "$2" 2>&1
echo "code $?"
