# What a node is and has, read only, as one JSON object of texts: one key for each topic, as the kernel or the program
# told it. Sense is made of them elsewhere (deskfleet.fleet.facts). What cannot be read is listed under "unknown" with
# the reason, and never guessed.
#
# $1  a directory that holds a recorded machine (sys, proc, etc, and commands/NAME with what the program NAME said);
#     empty for the machine itself
# $2  an image to look for, may be empty
# $3  $4  $5  the directories of checkpoint, Engram rows and cache, may be empty
#
# Needs bash 4.1 and coreutils. Everything that may take long begins at once and is awaited at the end.

LC_ALL=C
export LC_ALL
root=$1 image=$2 checkpoint=$3 engram=$4 cache=$5
backslash='\\' quote='\"' newline='\n' tab='\t' return='\r'
declare -A fd_of unknown
separator='{'

# --- JSON

escaped() { # the text $1 as a JSON string, in $text
    text=${1//\\/"$backslash"}
    text=${text//\"/"$quote"}
    text=${text//$'\n'/"$newline"}
    text=${text//$'\t'/"$tab"}
    text=${text//$'\r'/"$return"}
    text="\"${text//[$'\001'-$'\037']/ }\""
}

tell() { # topic $1 is text $2
    escaped "$2"
    printf '%s"%s":%s\n' "$separator" "$1" "$text"
    separator=','
}

# --- sources

tell_file() { # topic $1 is what file $2 holds
    local content=''
    if { IFS= read -r -d '' content <"$root$2"; } 2>/dev/null || [ -n "$content" ]; then
        tell "$1" "$content"
    elif [ -e "$root$2" ]; then
        unknown[$1]="$2 cannot be read"
    else
        unknown[$1]="$2: No such file or directory"
    fi
}

begin() { # topic $1 will be what the command $2... says
    local topic=$1 fd
    shift
    if [ -n "$root" ]; then
        fd=-1 # what was recorded is at hand
    elif declare -F "$1" >/dev/null; then
        exec {fd}< <("$@" 2>&1; printf '\n%s' "$?")
    elif ! command -v "$1" >/dev/null; then
        exec {fd}< <(printf 'there is no program %s\n127' "$1")
    else
        exec {fd}< <(timeout 8 "$@" 2>&1; printf '\n%s' "$?")
    fi
    fd_of[$topic]=$fd
}

finish() { # await topic $1
    local said='' code=0 fd=${fd_of[$1]}
    if [ "$fd" != -1 ]; then
        said=$(cat <&"$fd")
        exec {fd}<&-
        code=${said##*$'\n'}
        said=${said%$'\n'*}
    elif [ -e "$root/commands/$1" ]; then
        IFS= read -r -d '' said <"$root/commands/$1"
    elif [ -e "$root/commands/$1.failed" ]; then
        code=1
        IFS= read -r -d '' said <"$root/commands/$1.failed"
    else
        code=1 said='it was not recorded'
    fi
    if [ "$code" = 0 ]; then tell "$1" "$said"; else unknown[$1]=${said:-it ended with $code}; fi
}

# --- what takes more than one line

told_paths() { # role, path, kind, writable, and what df says of the file system it is or would be on
    local role path near kind writable
    for role in checkpoint engram cache; do
        path=${!role}
        [ -n "$path" ] || continue
        near=$path
        while [ ! -e "$near" ] && [ "$near" != / ] && [ "$near" != . ]; do near=$(dirname -- "$near"); done
        kind=absent
        if [ -d "$path" ]; then kind='directory'; elif [ -e "$path" ]; then kind='file'; fi
        writable=no
        [ -w "$near" ] && writable=yes
        printf '%s\t%s\t%s\t%s\n' "$role" "$kind" "$writable" \
            "$(df -P -T -B1 -- "$near" | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2,5)"
    done
}

told_files() { # size and name of every file in directory $1
    [ -d "$1" ] || return 0
    find -L "$1" -maxdepth 1 -type f -printf '%s\t%f\n' | head -n 5000
}

told_units() { # scope, unit, active state
    local scope flag
    for scope in system user; do
        flag=
        [ "$scope" = user ] && flag=--user
        XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$UID} timeout 5 systemctl $flag list-units --all --plain \
            --no-legend --no-pager --type=service 'vllm*' 'sglang*' 'ray*' 'deskfleet*' '*llm*' '*sparkrun*' \
            'earlyoom*' 'systemd-oomd*' 'nohang*' 2>/dev/null |
            while read -r unit _ active _; do printf '%s\t%s\t%s\n' "$scope" "$unit" "$active"; done
    done
    [ -d /run/systemd/system ] || { echo 'systemd does not run here'; return 1; }
}

told_processes() { # engines and memory guards that run, not those who look for them
    ps -eo pid=,user=,args= --cols 300 | grep -v ' systemctl ' |
        grep -E '[v]llm |[v]llm\.|VLL[M]::|[s]glang|[r]ay::|[r]aylet|[t]orchrun|[d]eskfleet rank' | head -n 60
    ps -C earlyoom,nohang -o pid=,user=,args= --cols 300
    return 0
}

told_kernel_log() { # lines of this boot that speak of trouble
    local log
    log=$(dmesg --time-format iso 2>&1) || log=$(timeout 5 journalctl -k -b -q --no-pager -o short-iso 2>&1) || {
        echo "${log%%$'\n'*}"
        return 1
    }
    [ -n "$log" ] || { echo 'the kernel log is empty, or not ours to read'; return 1; }
    printf '%s\n' "$log" | grep -aE 'NVRM|Xid|[Oo]ut of memory|oom-kill|Killed process|mlx5|nvme|I/O error|AER|Hardware Error|hung|blocked for more than|soft lockup|thermal|hrottl|EXT4-fs error|not responding' |
        tail -n 200 | cut -c 1-300
    return 0
}

told_nccl() { # NCCL libraries of the machine itself
    local found
    for found in /usr/lib/*/libnccl.so.2.*.* /usr/local/lib/libnccl.so.2.*.* /usr/local/cuda*/lib64/libnccl.so.2.*.*; do
        [ -e "$found" ] && printf '%s\n' "$found"
    done
    return 0
}

lines_of() { # "$2/NAME<tab>first line" for each file NAME of directory $1 that can be read
    local directory=$1 prefix=$2 name line
    shift 2
    for name; do
        line=
        { IFS= read -r line <"$directory/$name"; } 2>/dev/null
        [ -n "$line" ] && printf '%s/%s\t%s\n' "$prefix" "$name" "$line"
    done
}


tell_pci() { # "$2/pci<tab>address" of the PCIe function behind device $1, if there is one
    [ -e "$1/device" ] || return 0
    local target
    target=$(readlink -f -- "$1/device") && printf '%s/pci\t%s\n' "$2" "${target##*/}"
}

told_infiniband() {
    local base=$root/sys/class/infiniband device port index gid name
    [ -d "$base" ] || return 0
    for device in "$base"/*; do
        [ -d "$device" ] || continue
        name=${device##*/}
        printf '%s\n' "$name"
        tell_pci "$device" "$name"
        lines_of "$device" "$name" fw_ver hca_type board_id node_type
        for port in "$device"/ports/*; do
            [ -d "$port" ] || continue
            lines_of "$port" "$name/ports/${port##*/}" state phys_state rate link_layer
            for index in "$port"/gids/*; do
                gid=
                { IFS= read -r gid <"$index"; } 2>/dev/null
                case $gid in '' | 0000:0000:0000:0000:0000:0000:0000:0000) continue ;; esac
                printf '%s/ports/%s/gids/%s\t%s\n' "$name" "${port##*/}" "${index##*/}" "$gid"
                lines_of "$port/gid_attrs" "$name/ports/${port##*/}/gid_attrs" "types/${index##*/}" "ndevs/${index##*/}"
            done
        done
    done
}

told_net() {
    local base=$root/sys/class/net device name
    [ -d "$base" ] || return 0
    for device in "$base"/*; do
        [ -d "$device" ] || continue
        name=${device##*/}
        printf '%s\n' "$name"
        lines_of "$device" "$name" mtu operstate speed carrier
        [ -e "$device/device" ] || continue
        tell_pci "$device" "$name"
        lines_of "$device/device" "$name" current_link_width max_link_width current_link_speed max_link_speed
    done
}

told_cgroups() { # memory limits of our own group and of docker's, and of all above them
    local base=$root/sys/fs/cgroup own group
    own=$(sed -n 's/^0:://p' "$root/proc/self/cgroup" 2>/dev/null)
    for group in "$own" /system.slice/docker.service /docker; do
        while [ -n "$group" ] && [ "$group" != / ]; do
            lines_of "$base$group" "$group" memory.max memory.high
            group=${group%/*}
        done
    done | sort -u
}

# --- the document

begin time date +%s%N
begin docker docker info --format '{{json .}}'
begin containers docker ps --all --no-trunc --format '{{json .}}'
[ -n "$image" ] && begin image docker image inspect --format '{{json .}}' -- "$image"
begin gpus nvidia-smi --format=csv,noheader,nounits --query-gpu=index,name,driver_version,memory.total,memory.used,compute_cap,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,temperature.gpu,vbios_version
begin gpu_processes nvidia-smi --format=csv,noheader,nounits --query-compute-apps=pid,used_memory,process_name
begin units told_units
begin processes told_processes
begin kernel_log told_kernel_log
begin addresses ip -o address show
begin account id -un
begin uid id -u
begin groups id -Gn
begin hostname uname -n
begin arch uname -m
begin kernel uname -r
begin name_resolves_to getent ahostsv4 "$(uname -n)"
begin home printenv HOME
begin nccl told_nccl
begin paths told_paths
[ -n "$checkpoint" ] && begin checkpoint_files told_files "$checkpoint"
[ -n "$engram" ] && begin engram_files told_files "$engram"

tell format 1
finish time
tell_file os_release /etc/os-release
tell_file meminfo /proc/meminfo
tell_file uptime /proc/uptime
tell_file boot_id /proc/sys/kernel/random/boot_id
tell_file min_free_kbytes /proc/sys/vm/min_free_kbytes
[ -e "$root/sys/class/dmi/id/product_name" ] && tell_file product /sys/class/dmi/id/product_name
[ -e "$root/sys/class/dmi/id/bios_version" ] && tell_file bios /sys/class/dmi/id/bios_version
tell_file tcp /proc/net/tcp
[ -e "$root/proc/net/tcp6" ] && tell_file tcp6 /proc/net/tcp6
tell cgroups "$(told_cgroups)"
tell infiniband "$(told_infiniband)"
tell net "$(told_net)"
for topic in "${!fd_of[@]}"; do
    [ "$topic" = time ] || finish "$topic"
done
printf ',"unknown":'
separator='{'
for topic in "${!unknown[@]}"; do tell "$topic" "${unknown[$topic]}"; done
[ "$separator" = '{' ] && printf '{'
printf '}}\n'
