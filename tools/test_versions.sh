#!/usr/bin/env bash
# Run the quick tests, without the extras, with three sets of package versions that setup.cfg allows: the oldest versions,
# a middle version of torch with the oldest gymnasium, and the newest versions. docs/faq.md lists the tested versions.
#
#     tools/test_versions.sh FOLDER                       # environments and logs go to FOLDER, outside of the repository
#     tools/test_versions.sh FOLDER tests/numerics -x     # further arguments are passed to pytest
#     PYTHON=python3.12 tools/test_versions.sh FOLDER
#
# Existing environments in FOLDER (oldest, middle, newest) are reused. torch is installed from TORCH_INDEX; the default
# are the builds without CUDA, which are a tenth of the size. If that index cannot be reached, set
# TORCH_INDEX=https://pypi.org/simple. The script prints a table, and fails if a test fails in any environment.
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^set/{/^#/s/^# \?//p}' "$0" >&2
    exit 2
fi
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath -m "$1")
shift
if [[ $folder/ == "$repository"/* ]]; then
    echo "$folder is inside the repository, where the tests would import its packages; choose a folder outside" >&2
    exit 2
fi
mkdir -p "$folder"

required() { # requirements of setup.cfg, one per line
    "${PYTHON:-python3}" -c "import configparser, sys; c = configparser.ConfigParser(); c.read(sys.argv[1])
print(c['options']['install_requires'].strip())" "$repository/setup.cfg"
}

oldest() { # the requirements with their lowest versions
    required | sed 's/>=\([0-9.]*\).*/==\1/'
}

make_environment() { # name, requirements; torch comes first
    local pip=("$folder/$1/bin/python" -m pip install -q --disable-pip-version-check)
    echo "installing ${*:2} into $folder/$1" >&2
    "${PYTHON:-python3}" -m venv "$folder/$1" &&
        "${pip[@]}" --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$2" &&
        "${pip[@]}" "${@:2}" -r <(required) pytest pytest-xdist hypothesis
}

describe='import gymnasium, numpy, optree, platform, torch
print(platform.python_version(), torch.__version__, gymnasium.__version__, numpy.__version__, optree.__version__, sep=" | ")'
table='| python | torch | gymnasium | numpy | optree | tests |'$'\n''| --- | --- | --- | --- | --- | --- |'
status=0
cd "$repository"
export PYTHONPATH=$repository
for name in oldest middle newest; do
    case $name in # torch comes first in each
        oldest) wanted=$(oldest) ;;
        middle) wanted="torch==2.9.1 $(oldest | grep '^gymnasium')" ;;
        newest) wanted=$(required) ;;
    esac
    mapfile -t wanted < <(tr -s ' ' '\n' <<<"$wanted")
    python=$folder/$name/bin/python
    if [[ ! -x $python ]] && ! make_environment "$name" "${wanted[@]}"; then
        rm -rf "${folder:?}/$name"
        exit 1
    fi
    echo "testing with $name; see $folder/$name.log" >&2
    "$python" -m pytest -q -m 'not slow' "$@" >"$folder/$name.log" 2>&1 || status=1
    table+=$'\n'"| $("$python" -c "$describe") | $(tail -n 1 "$folder/$name.log") |"
done
echo "$table"
exit "$status"
