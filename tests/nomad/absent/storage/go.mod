module cloud.google.com/go/storage

go 1.20

require google.golang.org/api v0.217.0
