# Builds the patched wheel: packages -> toolchain -> source -> native -> wheel -> audit -> out.
# `sm12x bundle` stages the context, so that each stage sees only what it depends on; editing one
# patch rebuilds from `source` on, and `native` only if what is compiled has changed.
#
# No heredocs, no `COPY --link` and no `# syntax=` line: BuildKit of docker 20.10, podman and
# buildah must read it, and a syntax line would pull an image.
#
# hadolint global ignore=DL3008
# DL3008: Debian's archive keeps one version of a package within a release, so a pinned version
# breaks the build at the next security update; the base image's digest is recorded instead.
ARG BASE_IMAGE=debian:trixie-slim

# ---- Debian's Python 3.13 and GCC 14, and the locked build requirements with the CUDA toolkit.
FROM ${BASE_IMAGE} AS packages
RUN --mount=type=bind,source=with-host.sh,target=/run/build/with-host.sh \
    --mount=type=secret,id=ca,mode=0444,required=false \
    --mount=type=secret,id=env,mode=0444,required=false \
    --mount=type=secret,id=apt.conf,mode=0444,required=false \
    --mount=type=secret,id=apt.list,mode=0444,required=false \
    --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    sh /run/build/with-host.sh apt-get update -qq \
    && sh /run/build/with-host.sh apt-get install -y -qq --no-install-recommends \
         ca-certificates ccache g++ git python3 python3-dev python3-venv
COPY uv.lock /opt/uv.lock
RUN --mount=type=bind,source=with-host.sh,target=/run/build/with-host.sh \
    --mount=type=secret,id=ca,mode=0444,required=false \
    --mount=type=secret,id=env,mode=0444,required=false \
    --mount=type=secret,id=netrc,mode=0444,required=false \
    --mount=type=bind,source=links,target=/run/build/links \
    --mount=type=cache,target=/root/.cache \
    python3 -m venv /opt/uv \
    && sh /run/build/with-host.sh /opt/uv/bin/pip install --disable-pip-version-check --quiet \
         --find-links /run/build/links --require-hashes --requirement /opt/uv.lock
COPY build.lock /opt/build.lock
# The cache mount is another file system: uv cannot link from it.
ENV UV_LINK_MODE=copy
RUN --mount=type=bind,source=with-host.sh,target=/run/build/with-host.sh \
    --mount=type=secret,id=ca,mode=0444,required=false \
    --mount=type=secret,id=env,mode=0444,required=false \
    --mount=type=secret,id=uv.toml,mode=0444,required=false \
    --mount=type=secret,id=netrc,mode=0444,required=false \
    --mount=type=bind,source=links,target=/run/build/links \
    --mount=type=cache,target=/root/.cache \
    python3 -m venv --without-pip /opt/toolchain \
    && sh /run/build/with-host.sh /opt/uv/bin/uv pip install --quiet \
         --python /opt/toolchain/bin/python --find-links /run/build/links --require-hashes --requirement /opt/build.lock

# ---- This package, and a CUDA_HOME made of the packages.
FROM packages AS toolchain
COPY sm12x /sm12x
COPY base /sm12x/patches
ENV SM12X_ROOT=/sm12x \
    PYTHONPATH=/sm12x/scripts \
    PYTHONDONTWRITEBYTECODE=1 \
    PATH=/opt/toolchain/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN python -m sm12x build toolchain --out /opt/cuda \
      --site-packages "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# ---- The release's source with the stack on it.
FROM toolchain AS source
ARG BASE
COPY patches /sm12x/patches
RUN --mount=type=bind,source=sources,target=/run/build/sources \
    python -m sm12x build source --base "${BASE}" --sdist /run/build/sources/*.tar.gz --out /src

# ---- What the stack changes in C++ and CUDA. Only what a compiler reads is copied, so that this
# stage stays cached when a patch changes nothing but Python.
FROM toolchain AS native
ARG BASE
ARG ARCH_LIST
COPY --from=source /src.native.json /src.native.json
COPY --from=source /src/CMakeLists.txt /src/CMakeLists.txt
COPY --from=source /src/cmake /src/cmake
COPY --from=source /src/csrc /src/csrc
ENV CCACHE_DIR=/root/.cache/ccache \
    CMAKE_C_COMPILER_LAUNCHER=ccache \
    CMAKE_CXX_COMPILER_LAUNCHER=ccache \
    CMAKE_CUDA_COMPILER_LAUNCHER=ccache
RUN --mount=type=cache,target=/root/.cache \
    python -m sm12x build native --base "${BASE}" --source /src --cuda-home /opt/cuda \
      --arch-list "${ARCH_LIST}" --out /native

# ---- The wheel with its ledger, and the audit of what it holds.
FROM toolchain AS wheel
ARG BASE
ARG MACHINE
COPY patches /sm12x/patches
COPY --from=source /src.json /src.native.json /
COPY --from=source /src /src
COPY --from=native /native /native
RUN --mount=type=bind,source=sources,target=/run/build/sources \
    python -m sm12x build wheel --base "${BASE}" --machine "${MACHINE}" \
      --official /run/build/sources/*.whl --source /src --native /native --out /out

FROM wheel AS audit
ARG BASE
# A wheel that breaks the policy ends the build here, with the report in the log.
RUN python -m sm12x audit --base "${BASE}" /out/*.whl > /out/audit.txt \
      || { cat /out/audit.txt; exit 1; } \
    && python -m sm12x audit --base "${BASE}" --json /out/*.whl > /out/audit.json

FROM scratch AS out
COPY --from=audit /out/ /
