# Runs a Python program that was put on a node which may have no Python: with an interpreter of 3.10 or newer where there is
# one, else inside the engine's image. The program removes its own file when it starts.
#   $1 an interpreter to try first, or empty      $2 the engine's image, or empty
#   $3 the directory that the program works in    $4 the program's file, in that directory
#   $5 a package that it imports, or empty        $6 another directory that it reads, or empty
#   $7 what the image needs mounted, lines of docker's --volume
#   $8... the program's arguments
set -eu
umask 022
first=$1 image=$2 directory=$3 program=$4 package=$5 read=$6 mounts=$7
shift 7
trap 'rm -f -- "$program"' EXIT
# One whose command was killed before it started may hold a token.
find "$directory" -maxdepth 1 -name '.deskfleet-program-*.py' -mmin +10 -exec rm -f -- {} + 2>/dev/null || true
is_fit='import importlib.util as u, sys
sys.exit(sys.version_info < (3, 10) or bool(sys.argv[1]) and u.find_spec(sys.argv[1]) is None)'

run() { # an interpreter, and how to start it
  # Isolated: the directory is a checkpoint, and a file in it must not pass for a module.
  "$@" -I -u "$program" "${arguments[@]}"
  exit
}

arguments=("$@")
box=(docker run --rm --network host --user "$(id -u):$(id -g)" --entrypoint python3)
box+=(--volume "$directory:$directory")
while IFS= read -r mount; do [ -z "$mount" ] || box+=(--volume "$mount"); done <<<"$mounts"
[ -z "$read" ] || box+=(--volume "$read:$read:ro")
if [ -n "$first" ] && "$first" -I -c "$is_fit" "$package" 2>/dev/null; then run "$first"; fi
# A package of ours is the image's before it is the node's: there it has the version that the engine will use.
if [ -n "$package" ] && [ -n "$image" ] && "${box[@]}" "$image" -I -c "$is_fit" "$package" 2>/dev/null; then
  run "${box[@]}" "$image"
fi
for python in python3 python; do
  if "$python" -I -c "$is_fit" "$package" 2>/dev/null; then run "$python"; fi
done
if [ -n "$image" ] && docker image inspect -- "$image" >/dev/null 2>&1; then run "${box[@]}" "$image"; fi
echo "there is no python3 of 3.10 or newer${package:+ that has $package}, and no engine image that has one" >&2
exit 2
