# shellcheck shell=bash
# Shared by the scripts that need one program of Debian 13 on an older Debian. Source it after common.sh.

# debian13_program PACKAGE FILE TO: the program FILE (usr/bin/...) of a package becomes TO. apt fetches and
# verifies it as always, from this machine's mirror, but with lists and settings of its own: nothing is
# installed and the machine's sources stay as they are. Needs no root.
debian13_program() {
  local package=$1 file=$2 to=$3 work mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg
  command -v apt-get dpkg-deb > /dev/null || die "there is no apt-get here to fetch $package with"
  [ -r $keys ] || die "$keys is not there (package debian-archive-keyring)"
  # shellcheck disable=SC2016  # apt expands it
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m 1 '/debian/*$') ||
    die "apt's sources name no mirror of Debian, so $package of Debian 13 cannot be fetched"
  work=$(mktemp -d)
  mkdir -p "$work"/lists/partial "$work"/cache/archives/partial "$(dirname "$to")"
  printf 'deb [signed-by=%s] %s trixie main\n' $keys "$mirror" > "$work/sources.list"
  local apt=(apt-get -qq -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none
    -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$work/lists"
    -o Dir::Cache="$work/cache" -o Dir::State::status=/dev/null)
  (
    trap 'rm -rf "$work"' EXIT
    "${apt[@]}" update > /dev/null || die "no network: $mirror, the mirror of Debian, is not reached"
    cd "$work" || exit
    "${apt[@]}" download "$package" > /dev/null || die "apt-get cannot fetch $package of Debian 13"
    dpkg-deb --fsys-tarfile ./"$package"_*.deb | tar -xO "./$file" > program
    chmod +x program
    ./program --help > /dev/null || die "$package of Debian 13 does not run here"
    mv program "$to"
  )
}
