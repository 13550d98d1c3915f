// Interop checks what Lamina's ledger writes with the packages note and tlog of golang.org/x/mod/sumdb.
//
// It reads one JSON object from standard input and answers with one on standard output. Every question is optional;
// an answer is "" for yes, and otherwise says what the Go package objects to.
package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type signedNote struct {
	Key, Note string
	Witnesses []string // verifier keys of kind 0x04
	Text      string   // answer: the text, if it verifies
	Signers   []string // answer: who signed it, among the keys given
	Problem   string
}

type inclusion struct {
	Index, Size int64
	Leaf        []byte // the leaf itself
	Root        tlog.Hash
	Proof       tlog.RecordProof
	Problem     string
}

type consistency struct {
	Old, New         int64
	OldRoot, NewRoot tlog.Hash
	Proof            tlog.TreeProof
	Problem          string
}

// A tree as tiles: Go authenticates them against the root and makes the proofs by itself.
type tree struct {
	Size    int64
	Root    tlog.Hash
	Tiles   map[string][]byte // C2SP path → hashes
	Leaves  []int64
	Olds    []int64
	Records []tlog.RecordProof // answers
	Trees   []tlog.TreeProof
	Problem string
}

type exchange struct {
	Notes       []signedNote
	Inclusion   []inclusion
	Consistency []consistency
	Trees       []tree
	Sign        string // a text for Go to sign
	Name        string
	SignedKey   string // answers
	SignedNote  string
}

func main() {
	var x exchange
	if err := json.NewDecoder(os.Stdin).Decode(&x); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	for i := range x.Notes {
		x.Notes[i].check()
	}
	for i := range x.Inclusion {
		p := &x.Inclusion[i]
		p.Problem = says(tlog.CheckRecord(p.Proof, p.Size, p.Root, p.Index, tlog.RecordHash(p.Leaf)))
	}
	for i := range x.Consistency {
		p := &x.Consistency[i]
		p.Problem = says(tlog.CheckTree(p.Proof, p.New, p.NewRoot, p.Old, p.OldRoot))
	}
	for i := range x.Trees {
		x.Trees[i].Problem = says(x.Trees[i].prove())
	}
	if x.Sign != "" {
		secret, public, err := note.GenerateKey(rand.Reader, x.Name)
		exitOn(err)
		signer, err := note.NewSigner(secret)
		exitOn(err)
		signed, err := note.Sign(&note.Note{Text: x.Sign}, signer)
		exitOn(err)
		x.SignedKey, x.SignedNote = public, string(signed)
	}
	exitOn(json.NewEncoder(os.Stdout).Encode(x))
}

func (n *signedNote) check() {
	verifiers := []note.Verifier{}
	if n.Key != "" {
		v, err := note.NewVerifier(n.Key)
		if err != nil {
			n.Problem = says(err)
			return
		}
		verifiers = append(verifiers, v)
	}
	for _, key := range n.Witnesses {
		v, err := newWitness(key)
		if err != nil {
			n.Problem = says(err)
			return
		}
		verifiers = append(verifiers, v)
	}
	opened, err := note.Open([]byte(n.Note), note.VerifierList(verifiers...))
	if err != nil {
		n.Problem = says(err)
		return
	}
	n.Text = opened.Text
	for _, signature := range opened.Sigs {
		n.Signers = append(n.Signers, signature.Name)
	}
}

// A witness verifies cosignatures (kind 0x04), which the package note leaves to its users.
type witness struct {
	name string
	hash uint32
	key  ed25519.PublicKey
}

func newWitness(text string) (*witness, error) {
	parts := strings.SplitN(text, "+", 3)
	if len(parts) != 3 {
		return nil, fmt.Errorf("malformed witness key")
	}
	key, err := base64.StdEncoding.DecodeString(parts[2])
	if err != nil || len(key) != 33 || key[0] != 4 {
		return nil, fmt.Errorf("not a witness key")
	}
	sum := sha256.Sum256(append([]byte(parts[0]+"\n"), key...))
	hash := binary.BigEndian.Uint32(sum[:])
	if fmt.Sprintf("%08x", hash) != parts[1] {
		return nil, fmt.Errorf("wrong key hash")
	}
	return &witness{parts[0], hash, key[1:]}, nil
}

func (w *witness) Name() string    { return w.name }
func (w *witness) KeyHash() uint32 { return w.hash }
func (w *witness) Verify(text, value []byte) bool {
	if len(value) != 72 {
		return false
	}
	var message bytes.Buffer
	fmt.Fprintf(&message, "cosignature/v1\ntime %d\n%s", binary.BigEndian.Uint64(value), text)
	return ed25519.Verify(w.key, message.Bytes(), value[8:])
}

// Height, ReadTiles and SaveTiles make a tree a tlog.TileReader.
func (t *tree) Height() int { return 8 }

func (t *tree) SaveTiles([]tlog.Tile, [][]byte) {}

func (t *tree) ReadTiles(tiles []tlog.Tile) ([][]byte, error) {
	var found [][]byte
	for _, tile := range tiles {
		path := strings.Replace(tile.Path(), "tile/8/", "tile/", 1) // C2SP leaves the height out
		data, ok := t.Tiles[path]
		if !ok {
			return nil, fmt.Errorf("no tile at %s", path)
		}
		found = append(found, data)
	}
	return found, nil
}

func (t *tree) prove() error {
	hashes := tlog.TileHashReader(tlog.Tree{N: t.Size, Hash: t.Root}, t)
	for _, leaf := range t.Leaves {
		proof, err := tlog.ProveRecord(t.Size, leaf, hashes)
		if err != nil {
			return err
		}
		t.Records = append(t.Records, proof)
	}
	for _, old := range t.Olds {
		proof, err := tlog.ProveTree(t.Size, old, hashes)
		if err != nil {
			return err
		}
		t.Trees = append(t.Trees, proof)
	}
	return nil
}

func says(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}
