#!/usr/bin/env bash
# The quick tests with the oldest, a middle and the newest torch that setup.cfg allows, without the extras:
#
#     tools/test_versions.sh FOLDER                       # environments and logs go into FOLDER, outside of the repository
#     tools/test_versions.sh FOLDER tests/numerics -x     # only these tests; further arguments are pytest's
#     PYTHON=python3.12 tools/test_versions.sh FOLDER
#
# An environment that is in FOLDER already is used as it is. torch comes from TORCH_INDEX, by default the builds without
# CUDA, which are a tenth of the size. Prints a table; fails if a test fails in any of the environments.
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^set/{/^#/s/^# \?//p}' "$0" >&2
    exit 2
fi
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath -m "$1")
shift
if [[ $folder/ == "$repository"/* ]]; then
    echo "$folder is inside the repository, where tests would find the packages in it: name a folder outside" >&2
    exit 2
fi
mkdir -p "$folder"

required() { # what setup.cfg asks for, one a line
    "${PYTHON:-python3}" -c "import configparser, sys; c = configparser.ConfigParser(); c.read(sys.argv[1])
print(c['options']['install_requires'].strip())" "$repository/setup.cfg"
}

make_environment() { # name, versions: of torch first
    local pip=("$folder/$1/bin/python" -m pip install -q --disable-pip-version-check)
    echo "installing ${*:2} into $folder/$1" >&2
    "${PYTHON:-python3}" -m venv "$folder/$1" &&
        "${pip[@]}" --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$2" &&
        "${pip[@]}" "${@:2}" -r <(required) pytest pytest-xdist hypothesis
}

describe='import gymnasium, numpy, optree, platform, torch
print(platform.python_version(), torch.__version__, gymnasium.__version__, numpy.__version__, optree.__version__, sep=" | ")'
newest=$(required | grep '^torch\b')
table='| python | torch | gymnasium | numpy | optree | tests |'$'\n''| --- | --- | --- | --- | --- | --- |'
status=0
cd "$repository"
export PYTHONPATH=$repository
for versions in 'torch==2.6.0 gymnasium[classic-control]==1.1.1 numpy==1.26.4 optree==0.13.0' 'torch==2.9.1' "$newest"; do
    read -ra wanted <<<"$versions"
    name=$(sed 's/==/-/; s/^torch>.*/newest/' <<<"${wanted[0]}")
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
