# Builds the patched wheel: packages -> toolchain -> source -> native -> wheel -> audit -> out.
# `sm12x bundle` stages the context, so that each stage sees only what it depends on; editing one
# patch rebuilds from `source` on, and `native` only if compiled files have changed.
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
# --no-deps: the lock is resolved, and may replace a package's requirement ([[override]] in
# base.toml).
RUN --mount=type=bind,source=with-host.sh,target=/run/build/with-host.sh \
    --mount=type=secret,id=ca,mode=0444,required=false \
    --mount=type=secret,id=env,mode=0444,required=false \
    --mount=type=secret,id=uv.toml,mode=0444,required=false \
    --mount=type=secret,id=netrc,mode=0444,required=false \
    --mount=type=bind,source=links,target=/run/build/links \
    --mount=type=cache,target=/root/.cache \
    python3 -m venv --without-pip /opt/toolchain \
    && sh /run/build/with-host.sh /opt/uv/bin/uv pip install --quiet \
         --python /opt/toolchain/bin/python --no-deps --find-links /run/build/links --require-hashes \
         --requirement /opt/build.lock

# ---- This package, and a CUDA_HOME made of the packages.
FROM packages AS toolchain
COPY sm12x /sm12x
COPY base /sm12x/patches
ENV SM12X_ROOT=/sm12x \
    PYTHONPATH=/sm12x/scripts \
    PYTHONDONTWRITEBYTECODE=1 \
    PATH=/opt/toolchain/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN python -P -m sm12x build toolchain --out /opt/cuda \
      --site-packages "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# ---- The release's source with the stack on it.
FROM toolchain AS source
ARG BASE
COPY patches /sm12x/patches
RUN --mount=type=bind,source=sources,target=/run/build/sources \
    python -P -m sm12x build source --base "${BASE}" --sdist /run/build/sources/*.tar.gz --out /src

# ---- For another machine: its compiler, its packages to link with, and a CUDA_HOME of both. Empty
# for this machine. nvcc and the release's CMake run here, at full speed; no program of the other
# machine runs. This stage has its own apt caches: building the other machine's image can lock the
# shared ones for long.
FROM toolchain AS tools
ARG BASE
ARG CROSS
RUN --mount=type=bind,source=with-host.sh,target=/run/build/with-host.sh \
    --mount=type=secret,id=ca,mode=0444,required=false \
    --mount=type=secret,id=env,mode=0444,required=false \
    --mount=type=secret,id=uv.toml,mode=0444,required=false \
    --mount=type=secret,id=netrc,mode=0444,required=false \
    --mount=type=secret,id=apt.conf,mode=0444,required=false \
    --mount=type=secret,id=apt.list,mode=0444,required=false \
    --mount=type=bind,source=links,target=/run/build/links \
    --mount=type=cache,id=sm12x-tools-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=sm12x-tools-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=cache,target=/root/.cache \
    if [ -n "${CROSS}" ]; then \
      sh /run/build/with-host.sh apt-get update -qq \
      && sh /run/build/with-host.sh apt-get install -y -qq --no-install-recommends \
           "g++-${CROSS}-linux-gnu" \
      && sh /run/build/with-host.sh python -P -m sm12x build packages --base "${BASE}" \
           --machine "${CROSS}" --find-links /run/build/links --out /opt/target \
      && python -P -m sm12x build toolchain --machine "${CROSS}" --target-packages /opt/target \
           --out /opt/cuda \
           --site-packages "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
    fi

# ---- The native modules: in quick mode those that the stack changes in C++, in full mode every
# module. Only files that a compiler reads are copied, so that this stage stays cached when a patch
# changes only Python. The work folder and the compiler's cache outlive a build that failed or was
# interrupted: the next one compiles the remaining units, and after an edit only the units that read
# the edited file.
FROM tools AS native
ARG BASE
ARG MACHINE
ARG ARCH_LIST
ARG MODE
ARG PATCH_LEVELS
COPY --from=source /src.native.json /src.native.json
COPY --from=source /src/CMakeLists.txt /src/CMakeLists.txt
COPY --from=source /src/cmake /src/cmake
COPY --from=source /src/csrc /src/csrc
# DEPEND: ccache takes a unit's dependencies from the compiler; without it each miss is preprocessed
# first.
ENV CCACHE_DIR=/root/.cache/ccache \
    CCACHE_MAXSIZE=10G \
    CCACHE_DEPEND=1
# buildah's cache key does not cover bind mounts: the hash of third_party's content does. The name
# of a work folder covers every change that ninja, which compares dates, would miss; only builds
# with the same name wait for each other. Work folders unused for two weeks are removed. AGAIN: the
# build uses no result of an earlier build, not even the compiler's cache.
ARG THIRD_PARTY_SHA256
ARG NATIVE_KEY
ARG AGAIN
ENV NATIVE_WORK=/var/cache/sm12x-units/${NATIVE_KEY}
RUN --mount=type=bind,source=third_party,target=/run/build/third_party \
    --mount=type=cache,target=/root/.cache \
    --mount=type=cache,id=sm12x-units,target=/var/cache/sm12x-units \
    : "${THIRD_PARTY_SHA256}" \
    && if [ -n "${AGAIN}" ]; then rm -rf "${NATIVE_WORK}"; export CCACHE_DISABLE=1; fi \
    && mkdir -p "${NATIVE_WORK}" \
    && touch "${NATIVE_WORK}" \
    && find /var/cache/sm12x-units -mindepth 1 -maxdepth 1 -mtime +14 -exec rm -rf {} + \
    && SM12X_ACCEPT_PATCH_LEVEL="${PATCH_LEVELS}" \
       flock "${NATIVE_WORK}.lock" \
       python -P -m sm12x build native --base "${BASE}" --machine "${MACHINE}" --mode "${MODE}" \
         --third-party /run/build/third_party --source /src --cuda-home /opt/cuda \
         --arch-list "${ARCH_LIST}" --work "${NATIVE_WORK}" --out /native

# ---- The wheel with its ledger, and the audit of the wheel.
FROM toolchain AS wheel
ARG BASE
ARG MACHINE
COPY patches /sm12x/patches
COPY --from=source /src.json /src.native.json /
COPY --from=source /src /src
COPY --from=native /native /native
ARG AGAIN
RUN --mount=type=bind,source=sources,target=/run/build/sources \
    : "${AGAIN}" \
    && python -P -m sm12x build wheel --base "${BASE}" --machine "${MACHINE}" \
      --official /run/build/sources/*.whl --source /src --native /native --out /out

FROM wheel AS audit
ARG BASE
ARG DEVICES
ENV SM12X_AUDIT_DEVICES=${DEVICES}
# A wheel that breaks the policy ends the build here, with the report in the log. buildah's chroot
# isolation can lose what a step prints as it ends: it gets a second to copy the report.
RUN python -P -m sm12x audit --base "${BASE}" /out/*.whl > /out/audit.txt \
      || { cat /out/audit.txt; sleep 1; exit 1; } \
    && python -P -m sm12x audit --base "${BASE}" --json /out/*.whl > /out/audit.json

FROM scratch AS out
COPY --from=audit /out/ /
