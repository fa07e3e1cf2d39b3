from kvlab.checkpoint import main

raise SystemExit(main())
