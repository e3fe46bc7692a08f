#!/usr/bin/env bash
# Performs the steps of the Dockerfile in their order, in a clean Debian root made with debootstrap, where no Docker
# engine is at hand; then, as the image's user, what the image starts by itself, or the commands that are given.
#
#   tests/cluster/dockerfile_steps.sh --list                         the steps, one a line; does nothing
#   tests/cluster/dockerfile_steps.sh [OPTIONS] ROOT [COMMAND ...]   as root; ROOT must be new
#     --build-arg NAME=VALUE                                         as docker build has it
#     --mount FOLDER                                                 is there inside, too, not to be written to
#     --again                                                        commands only, in a ROOT that is made
#
# Each COMMAND is one word, run without the image's entrypoint: 'megalite train train.steps=20'. The Debian archive is that of this machine's apt (or DEBIAN_MIRROR),
# and pip inside gets this machine's PIP_ variables and certificates. Mounts and processes end with this script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

die() {
    echo "dockerfile_steps.sh: $*" >&2
    exit 2
}

# --- reading the Dockerfile ----------------------------------------------------------------------------------------

# One instruction a line: comments and empty lines go, continued lines become one.
steps() {
    sed -e '/^[[:space:]]*#/d' -e '/^[[:space:]]*$/d' Dockerfile | sed -e ':join' -e '/\\$/{N;s/\\\n[[:space:]]*//;b join' -e '}'
}

declare -A given=() # build arguments
mounts=()
list= again=
while [ $# -gt 0 ]; do
    case $1 in
        --list) list=yes && shift ;;
        --again) again=yes && shift ;;
        --build-arg)
            [[ ${2-} == *=* ]] || die "--build-arg NAME=VALUE"
            given[${2%%=*}]=${2#*=}
            shift 2
            ;;
        --mount)
            [ -d "${2-}" ] || die "--mount FOLDER"
            mounts+=("$(realpath "$2")")
            shift 2
            ;;
        -*) die "unknown option $1" ;;
        *) break ;;
    esac
done
if [ "$list" ]; then
    steps
    exit
fi
[ $# -gt 0 ] || die "where to? tests/cluster/dockerfile_steps.sh ROOT [COMMAND ...]"
[ "$(id -u)" = 0 ] || die "debootstrap and chroot need root"

# Mounts and processes of this script end with it.
if [ -z "${IN_OWN_NAMESPACE-}" ]; then
    options=(${again:+--again})
    for name in "${!given[@]}"; do options+=(--build-arg "$name=${given[$name]}"); done
    for name in ${mounts[@]+"${mounts[@]}"}; do options+=(--mount "$name"); done
    IN_OWN_NAMESPACE=yes exec unshare --mount --pid --fork --kill-child tests/cluster/dockerfile_steps.sh \
        ${options[@]+"${options[@]}"} "$@"
fi

root=$(realpath -m "$1")
shift
[ "$root" != / ] || die "ROOT is a new folder"

# --- the state that instructions change ----------------------------------------------------------------------------

declare -A variables=([PATH]=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
declare -A arguments=() # ARG: seen by RUN, not by the image's command
workdir=/ user=root entrypoint= command=

assignments() { # NAME=VALUE of an associative array
    local -n array=$1
    local name
    for name in "${!array[@]}"; do printf '%s\0' "$name=${array[$name]}"; done
}

environment() { # what a RUN sees
    assignments variables
    assignments arguments
}

expanded() { # the words of an instruction, with variables as the image has them and quotes as a shell reads them
    local pairs
    mapfile -d '' pairs < <(environment)
    env -i "${pairs[@]}" bash -c "set -f; set -- $1; "'printf "%s\0" "$@"'
}

inside() { # SHELL_COMMAND: run as the user in the working directory, with the image's environment and what stdin adds
    local pairs
    mapfile -d '' pairs
    chroot --userspec="$user" "$root" /usr/bin/env -i "${pairs[@]}" HOSTNAME=rehearsal \
        /bin/sh -c 'cd "$1" && eval "$2"' sh "$workdir" "$1" </dev/null
}

# --- the instructions ----------------------------------------------------------------------------------------------

from() { # debian:CODENAME[-DATE][-slim] is what debootstrap makes
    local image=$1 codename mirror
    [[ $image == debian:* ]] || die "only Debian bases can be made here, not $image (--build-arg BASE=debian:bookworm-slim)"
    codename=${image#debian:}
    codename=${codename%%-*}
    if [ ! "$again" ]; then
        [ ! -e "$root" ] || rmdir "$root" 2>/dev/null || die "$root exists and is not empty"
        mirror=${DEBIAN_MIRROR:-$(sed -nE 's|^URIs: *(\S*/debian/?)$|\1|p; s|^deb +(\[.*\] +)?(\S*/debian/?) .*|\2|p' \
            /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -n 1)}
        [ "$mirror" ] || die "no Debian archive found in /etc/apt; set DEBIAN_MIRROR"
        debootstrap --variant=minbase "$codename" "$root" "$mirror" >"$root.log" 2>&1 || die "debootstrap failed: see $root.log"
        mv "$root.log" "$root/var/log/debootstrap.log"
    fi
    mount_machine
}

mount_machine() { # what Docker gives a container: proc, devices, name resolution; and pip's ways to its packages
    mount --make-rprivate /
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    mkdir "$root/dev/shm" "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    local device
    for device in null zero full random urandom tty; do
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    ln -s /proc/self/fd "$root/dev/fd"
    local file
    for file in /etc/resolv.conf /etc/hosts; do
        [ -e "$file" ] || continue
        rm -f "$root$file"
        cp -L "$file" "$root$file"
    done
    local line
    while IFS= read -r line; do
        arguments[${line%%=*}]=${line#*=}
    done < <(env | grep -E '^(PIP_|https?_proxy=|HTTPS?_PROXY=|no_proxy=|NO_PROXY=)' || true)
    if [ -e "${arguments[PIP_CERT]-}" ]; then
        cp -L "${arguments[PIP_CERT]}" "$root/etc/rehearsal-certificates.crt"
        arguments[PIP_CERT]=/etc/rehearsal-certificates.crt
    fi
    for line in ${mounts[@]+"${mounts[@]}"}; do
        mkdir -p "$root$line"
        mount --bind -o ro "$line" "$root$line"
    done
}

copy() { # SOURCE ... TARGET, from the build context: this folder without what .dockerignore names
    local words excluded=() line target
    mapfile -d '' words < <(expanded "$1")
    while IFS= read -r line; do
        case $line in
            '' | '#'*) ;;
            '**/'*) excluded+=(--no-anchored --exclude="${line#\*\*/}") ;;
            *) excluded+=(--anchored --exclude="$line" --exclude="./$line") ;;
        esac
    done <.dockerignore
    target=${words[-1]}
    [[ $target == /* ]] || target=$workdir/$target
    unset 'words[-1]'
    mkdir -p "$root$target"
    local source
    for source in "${words[@]}"; do
        if [ -d "$source" ]; then
            tar --create "${excluded[@]}" --directory "$source" . | tar --extract --no-same-owner --directory "$root$target"
        else
            [[ $target == */ || ${#words[@]} -gt 1 ]] || die "COPY of a file needs a folder that ends in /: $1"
            cp "$source" "$root$target"
        fi
    done
}

words_of() { # the JSON list of words, as a shell command
    python3 -c 'import json, shlex, sys; print(shlex.join(json.loads(sys.argv[1])))' "$1"
}

perform() { # INSTRUCTION REST
    local rest=$2 words name
    case $1 in
        ARG)
            name=${rest%%=*}
            if [ -v "given[$name]" ]; then
                arguments[$name]=${given[$name]}
            elif [[ $rest == *=* ]]; then
                mapfile -d '' words < <(expanded "$rest")
                arguments[$name]=${words[0]#*=}
            fi
            ;;
        FROM)
            mapfile -d '' words < <(expanded "$rest")
            arguments=() # those before FROM are for FROM
            from "${words[0]}"
            ;;
        ENV)
            mapfile -d '' words < <(expanded "$rest")
            for name in "${words[@]}"; do variables[${name%%=*}]=${name#*=}; done
            ;;
        WORKDIR)
            mapfile -d '' words < <(expanded "$rest")
            workdir=${words[0]}
            mkdir -p "$root$workdir"
            ;;
        USER) user=$rest ;;
        COPY) [ "$again" ] || copy "$rest" ;;
        RUN) [ "$again" ] || environment | inside "$rest" ;;
        ENTRYPOINT) entrypoint=$(words_of "$rest") ;;
        CMD) command=$(words_of "$rest") ;;
        *) die "the Dockerfile has a step that this script does not know: $1" ;;
    esac
}

[ ! "$again" ] || [ -e "$root/.made" ] || die "$root is not made yet"
count=$(steps | wc -l)
number=0
while IFS= read -r step <&3; do
    number=$((number + 1))
    [ "$again" ] || echo "[$number/$count] $step"
    began=$SECONDS
    perform "${step%% *}" "${step#* }" || die "this step failed: $step"
    [ $((SECONDS - began)) -lt 5 ] || echo "    $((SECONDS - began)) s"
done 3< <(steps)

touch "$root/.made"
[ "$user" != root ] || die "the image's user is root"
[ $# -gt 0 ] || set -- "$entrypoint $command"
for words in "$@"; do
    echo "[$user] $words"
    began=$SECONDS
    assignments variables | inside "$words" || die "this command failed with status $?: $words"
    echo "    $((SECONDS - began)) s"
done
echo "all steps and commands are done"
