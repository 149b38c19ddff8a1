# Shared by scripts/bench and scripts/test: one .venv in the checkout, installed once, repaired when an install was cut.
# Sourced by bash with $0 naming the script the user called. Uses pip alone and whatever index pip is configured with.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
VPY=$VENV/bin/python
LOG=$VENV/install.log
SELF=scripts/${0##*/}
# An activated .venv must not be the interpreter from which the same .venv is rebuilt.
PATH=:$PATH: && PATH=${PATH//":$VENV/bin:"/:} && PATH=${PATH#:} && PATH=${PATH%:}
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1   # `user = true` in a pip.conf breaks every venv

# Extras of each set; the test set contains the bench set, so installing it writes both stamps.
extras_of() {
    case $1 in
        bench) printf 'pytest,report' ;;
        test) printf 'dev,compile' ;;
    esac
}

say() { printf 'kvbench: %s\n' "$*" >&2; }
die() { local code=$1; shift; say "$*"; exit "$code"; }

# Print "VERSION" or "VERSION novenv" of interpreter $1; fail when it does not run (a pyenv shim without a version).
probe_python() {
    "$1" -c 'import sys
version = "%d.%d.%d" % tuple(sys.version_info[:3])
try:
    import ensurepip, venv
except ImportError:
    version += " novenv"
print(version)' 2>/dev/null
}

new_enough() {
    case $1 in [0-9]*.[0-9]*) ;; *) return 1 ;; esac     # an executable that is no Python says nothing
    local major=${1%%.*} rest=${1#*.}
    [ "$major" -gt 3 ] || { [ "$major" -eq 3 ] && [ "${rest%%.*}" -ge 11 ]; }
}

# Set BASE_PYTHON to an interpreter >= 3.11 that can make a venv, or end with one line that names what was found.
find_python() {
    local name path info found='' lacking=''
    if [ -n "${PYTHON:-}" ]; then
        path=$(command -v -- "$PYTHON") || die 2 "PYTHON=$PYTHON is not an executable; set PYTHON= to a Python >= 3.11"
        info=$(probe_python "$path") || die 2 "PYTHON=$PYTHON does not run as Python; set PYTHON= to a Python >= 3.11"
        new_enough "${info% novenv}" ||
            die 2 "PYTHON=$PYTHON is Python ${info% novenv}, expected >= 3.11; set PYTHON= to a newer one"
        case $info in *novenv) no_venv_module "$path" "${info% novenv}" ;; esac
        BASE_PYTHON=$path
        return
    fi
    for name in python3.13 python3.12 python3.11 python3 python; do
        path=$(command -v -- "$name") || continue
        info=$(probe_python "$path") || continue
        if ! new_enough "${info% novenv}"; then
            found="$found${found:+, }$path ($info)"
        elif [ "$info" != "${info% novenv}" ]; then
            [ -n "$lacking" ] || lacking="$path ${info% novenv}"
        else
            BASE_PYTHON=$path
            return
        fi
    done
    [ -z "$lacking" ] || no_venv_module "${lacking% *}" "${lacking##* }"
    die 2 "no Python >= 3.11, found ${found:-none}; install one (Debian, Ubuntu: apt-get install python3 python3-venv)" \
        "or set PYTHON=/path/to/python3.11"
}

no_venv_module() {
    local minor=${2#*.}
    die 2 "$1 ($2) has no venv module (ensurepip is missing); install it (Debian, Ubuntu: apt-get install" \
        "python3-venv or python3.${minor%%.*}-venv) or set PYTHON= to another Python >= 3.11"
}

# The key of a finished install: set, extras, interpreter, place of the checkout (it is editable), and pyproject.toml.
stamp_key() {
    local version
    version=$("$VPY" -I -S -c 'import sys; print(sys.version)' 2>/dev/null) || return 1
    { printf '%s\n' "$1" "$(extras_of "$1")" "$version" "$ROOT"; cat "$ROOT/pyproject.toml"; } | sha256sum
}

env_ready() {
    local key
    [ -x "$VPY" ] && [ -f "$VENV/.stamp-$1" ] || return 1
    key=$(stamp_key "$1") && [ "$key" = "$(cat "$VENV/.stamp-$1")" ] || return 1
    same_as_asked
}

# An explicit PYTHON= of another version than the .venv's asks for a new .venv.
same_as_asked() {
    [ -n "${PYTHON:-}" ] || return 0
    local asked have
    asked=$(probe_python "$PYTHON") || return 1     # find_python says what is wrong with it
    have=$(probe_python "$VPY") && [ "${have% novenv}" = "${asked% novenv}" ]
}

write_stamp() {
    stamp_key "$1" >"$VENV/.stamp-$1.new" && mv "$VENV/.stamp-$1.new" "$VENV/.stamp-$1"
}

# Hold the lock of this checkout's .venv on descriptor 9; the kernel releases it however the holder ends.
take_lock() {
    mkdir -p "$VENV" && exec 9>>"$VENV/.lock" || die 2 "$VENV cannot be written; give write access to the checkout"
    try_lock -n && return
    say "another install is at work in this checkout; waiting for it"
    try_lock
}

try_lock() {
    if command -v flock >/dev/null; then
        flock "$@" 9
    else
        "$BASE_PYTHON" -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if "-n" in sys.argv else 0))
except BlockingIOError:
    sys.exit(1)' "$@"
    fi
}

# Make .venv, or make it again where the interpreter is gone, another one is asked for, or pip never got in.
ensure_venv() {
    if "$VPY" -m pip --version >/dev/null 2>&1 && new_enough "$(probe_python "$VPY")" && same_as_asked; then
        return
    fi
    find_python
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
    "$BASE_PYTHON" -m venv "$VENV" >"$LOG" 2>&1 9>&- || {
        tail -n 5 "$LOG" >&2
        die 2 "$BASE_PYTHON could not make $VENV (above); mend that or set PYTHON= to another Python >= 3.11"
    }
}

# pip_install ARGS...: quiet; on failure the log's tail and one line that names the package.
pip_install() {
    printf '+ pip install %s\n' "$*" >>"$LOG"
    (cd "$ROOT" && exec "$VPY" -m pip install --progress-bar off "$@" >>"$LOG" 2>&1 9>&-) && return
    explain_pip
}

explain_pip() {
    local part package why
    part=$(awk '/^\+ pip install /{text=""} {text=text $0 "\n"} END{printf "%s", text}' "$LOG")
    printf '%s\n' "$part" | grep -vE '^ *($|note:|×|│|╰|\[end of output\])' | tail -n 5 | cut -c1-300 | sed 's/^/  | /' >&2
    package=$(printf '%s\n' "$part" | sed -n 's/.*No matching distribution found for \([^ ]*\).*/\1/p' | tail -n 1)
    [ -n "$package" ] ||
        package=$(printf '%s\n' "$part" | sed -n 's/^ *Collecting \([^ ]*\).*/\1/p' | tail -n 1)
    case $part in
        *'No space left on device'* | *'Errno 28'*)
            why="the disk is full: free some space" ;;
        *Retrying* | *ConnectionError* | *'Connection broken'* | *'timed out'* | *Timeout* | *ProxyError* | *SSLError* | *'name resolution'*)
            why="the download failed: check the network (HTTPS_PROXY, pip config)" ;;
        *'No matching distribution'*)
            why="pip's index offers no version for this Python $("$VPY" -c 'import platform; print(platform.python_version())')" ;;
        *)
            why=$(printf '%s\n' "$part" | grep -E '^ *(ERROR|error)' | tail -n 1 | cut -c1-200) ;;
    esac
    die 3 "could not install ${package:-the packages}; ${why:-pip failed}; then run $SELF again, repeating is safe" \
        "(log: $LOG)"
}

# ensure_env SET: after this the set is installed and stamped. Costs two file reads when it already is.
ensure_env() {
    local want=$1 begin=$SECONDS torch
    env_ready "$want" && return
    BASE_PYTHON=$VPY
    [ -x "$VPY" ] && probe_python "$VPY" >/dev/null || find_python
    take_lock
    if env_ready "$want"; then
        exec 9>&-
        return
    fi
    ensure_venv
    rm -f "$VENV"/.stamp-*      # from here to write_stamp a cut leaves no stamp, so the next call installs again
    say "installing [$(extras_of "$want")] into .venv, a few minutes at the first call (log: $LOG)"
    printf '# set %s\n' "$want" >"$LOG"
    if [ "$want" = test ]; then
        # torch 2.13.0 is a CPU build where pip's index has one; a plain `torch` pulls gigabytes of GPU libraries.
        # One that already imports is the user's choice and is pinned, so that no resolver replaces it.
        torch_version >/dev/null || pip_install torch==2.13.0
        torch=$(torch_version) || die 3 "torch is installed but does not import; see $VPY -c 'import torch'"
        printf 'torch==%s\n' "$torch" >"$VENV/torch.txt"
        # hatchling: tests/packaging builds the wheel offline, without a build environment of its own.
        pip_install -c "$VENV/torch.txt" -e ".[$(extras_of test)]" 'hatchling>=1.25'
        write_stamp test
    else
        pip_install -e ".[$(extras_of "$want")]"
    fi
    write_stamp bench
    exec 9>&-
    say "installed in $((SECONDS - begin)) s"
}

torch_version() { "$VPY" -W ignore -c 'import torch; print(torch.__version__)' 2>/dev/null; }
