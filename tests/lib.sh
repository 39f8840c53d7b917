# Sourced by tests/memcheck, tests/asan and tests/coverage: a copy of the tree, a virtual environment
# with what the tests need, and the module built there with flags of one's own.
# PYTHON=python3 makes the environment; VENV=/path saves that minute: one that has the `test` extra,
# such as the .venv of .ci/run. CC=gcc: the three use gcc's sanitizers and gcov.
# shellcheck shell=bash
self=tests/$(basename "$0")
under=() # what to start pytest with

fail() { # fail STATUS LINE: 2 is for what the caller got wrong
    echo "$self: $2" >&2
    exit "$1"
}

need() { # need COMMAND...
    local command
    for command; do
        command -v "$command" >/dev/null || fail 1 "$command is missing: install it first"
    done
}

# Goes to a copy of the tree and sets $work, $tree and $python.
# prepare PACKAGE...: what a fresh environment gets besides the `test` extra.
prepare() {
    export CC=${CC:-gcc}
    need git "$CC"
    if [ -n "${VENV:-}" ]; then
        [ -x "$VENV/bin/python" ] || fail 2 "VENV=$VENV has no bin/python"
        VENV=$(cd "$VENV" && pwd)
    else
        need "${PYTHON:-python3}"
    fi
    work=$(realpath "$(mktemp -d)")
    trap 'rm -rf "$work"' EXIT
    tree=$work/tree
    mkdir "$tree"
    # Also what is not committed yet.
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$tree"
    cd "$tree"
    if [ -z "${VENV:-}" ]; then
        VENV=$work/venv
        "${PYTHON:-python3}" -m venv "$VENV"
        "$VENV/bin/pip" install -q -e "$tree[test]" "$@"
    fi
    python=$VENV/bin/python
    # For children that run elsewhere: VENV may hold an editable installation of another tree.
    export PYTHONPATH=$tree
}

build() { # build FLAGS: the module, in the copy
    ARENA_CFLAGS=$1 "$python" setup.py -q build_ext --inplace --force >"$work/log" 2>&1 ||
        { cat "$work/log"; fail 1 "the module does not build with ARENA_CFLAGS='$1'"; }
}

run_tests() { # run_tests PYTEST_ARGUMENT...
    "${under[@]}" "$python" -m pytest -q -p no:cacheprovider "$@"
}

understood() { # understood PYTEST_ARGUMENT...: says in one line when pytest cannot take them
    run_tests --collect-only "$@" >"$work/log" 2>&1 ||
        fail 2 "$(grep -m1 ': error: \|^ERROR: [^u]\|^no tests' "$work/log" || tail -n 1 "$work/log")"
}

# Measures time or memory, or watches processes that the tool is not in.
irrelevant=(--ignore=tests/test_demo.py --ignore=tests/test_benchmarks.py --ignore=tests/test_churn.py
    --ignore=tests/test_readme.py --ignore=tests/test_map.py --ignore=tests/test_pytest_plugin.py
    --ignore=tests/test_doctor.py --ignore=tests/test_watch.py)
