# For other scripts, which read it with `.` in the checkout: what ccache, which Meson takes by itself, is told. Objects
# do not depend on where a checkout lies, and precompiled headers are cached, too. A cached object still counts only if
# every header that it was made of is there and has the same bytes.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
