"""`python -m spillway`: the program, and where what other programs are built with lies in the package."""
import sys

from .program import HERE, main

PLACES = {"--cmake-dir": "lib/cmake/spillway", "--pkgconfig-dir": "lib/pkgconfig", "--include-dir": "include",
          "--lib-dir": "lib"}

if len(sys.argv) == 2 and sys.argv[1] in PLACES:
    place = HERE / PLACES[sys.argv[1]]
    if not place.is_dir():
        sys.exit(f"spillway: {place} is not there, so this package was not installed; "
                 "`pip install .` in the checkout brings it")
    print(place)
else:
    main()
