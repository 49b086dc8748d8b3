# Sourced by scripts that need megacp and what it runs on: `megacp_venv EXTRAS` sees to a virtual environment and
# sets PYTHON to its python. It is made in .venv at first use, and brought up to date when setup.py, the wanted
# torch or the place of the checkout has changed.
#
#   MEGACP_VENV    use this environment as it is, and install nothing into it
#   MEGACP_TORCH   the torch to install, 2.13.0 if not set
#   MEGACP_PYTHON  the python that makes .venv, python3 if not set; 3.10 or later

megacp_venv() {
    local extras=$1 root venv wanted stamp quiet
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1

    if [ -n "${MEGACP_VENV:-}" ]; then
        PYTHON=$MEGACP_VENV/bin/python
        if ! [ -x "$PYTHON" ]; then
            echo "megacp: MEGACP_VENV is $MEGACP_VENV, and there is no $PYTHON." \
                "Name a virtual environment, or unset MEGACP_VENV to have one made." >&2
            return 1
        fi
        export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # megacp itself need not be installed there
        export PATH=$MEGACP_VENV/bin:$PATH
        return 0
    fi

    venv=$root/.venv
    PYTHON=$venv/bin/python
    export PATH=$venv/bin:$PATH
    wanted="torch==${MEGACP_TORCH:-2.13.0} $root $(cksum <"$root/setup.py")"
    stamp=$venv/megacp-${extras//,/-}
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi

    echo "megacp: setting up $venv with torch ${MEGACP_TORCH:-2.13.0} and megacp[$extras]; this is done once." >&2
    if ! "${MEGACP_PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "megacp: ${MEGACP_PYTHON:-python3} is not python 3.10 or later; name one in MEGACP_PYTHON." >&2
        return 1
    fi
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1 || ! grep -qsF "$root" "$venv"/megacp-*; then
        "${MEGACP_PYTHON:-python3}" -m venv --clear "$venv" || return 1
    fi
    quiet=-qq
    if [ -t 2 ]; then quiet=; fi # somebody watches: show how the downloads get on
    # One call for both, so that no requirement of megatron-core can bring another torch.
    if ! "$PYTHON" -m pip install $quiet --disable-pip-version-check \
        "torch==${MEGACP_TORCH:-2.13.0}" -e "$root[$extras]" >&2; then
        echo "megacp: pip could not install torch ${MEGACP_TORCH:-2.13.0} and megacp[$extras]; see above." >&2
        return 1
    fi
    printf '%s\n' "$wanted" >"$stamp"
}
