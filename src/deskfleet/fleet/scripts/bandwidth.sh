# One end of a measurement that takes a second: bytes pass from the end that sends to the end that receives.
#
# $1  receive or send
# $2  this end's address        $3  the other end's address
# $4  a port of the receiving end
# $5  RDMA device or empty      $6  its port       $7  its GID index
#
# With an RDMA device and perftest's ib_write_bw on this end RDMA is used, else TCP. Prints `tcp BYTES SECONDS` or
# `rdma GIGABITS_PER_SECOND` on the sending end.

LC_ALL=C
export LC_ALL
if [ -n "$5" ]; then
    set -- "$1" "$2" "$3" "$4" -d "$5" -i "$6" -x "$7" --port "$4" -D 1 -s 1048576 --report_gbits
    role=$1 other=$3
    shift 4
    [ "$role" = receive ] && exec timeout 12 ib_write_bw "$@" >/dev/null
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        # The last line of its table: bytes, iterations, peak, average, messages.
        if said=$(timeout 12 ib_write_bw "$@" "$other" 2>&1); then
            printf 'rdma %s\n' "$(printf '%s\n' "$said" | grep -E '^ *1048576 ' | tail -n 1 | tr -s ' ' | sed 's/^ //' | cut -d ' ' -f 4)"
            exit 0
        fi
        sleep 0.3
    done
    printf '%s\n' "$said" | tail -n 1 >&2
    exit 1
fi
exec timeout 12 python3 -c '
import socket, sys, time
role, own, other, port = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
block = bytes(1 << 20)
if role == "receive":
    with socket.create_server((own, port)) as server:
        server.settimeout(10)
        connection, _ = server.accept()
        connection.settimeout(10)
        total, room = 0, bytearray(1 << 20)
        while count := connection.recv_into(room):
            total += count
        connection.sendall(b"%d" % total)
        connection.close()
else:
    for attempt in range(50):
        try:
            connection = socket.create_connection((other, port), 5, (own, 0))
            break
        except OSError as error:
            if attempt == 49:
                sys.exit(f"{other}:{port}: {error}")
            time.sleep(0.1)
    begin = time.monotonic()
    while time.monotonic() - begin < 0.8:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    total = int(connection.recv(64))
    print("tcp", total, time.monotonic() - begin)
' "$1" "$2" "$3" "$4"
