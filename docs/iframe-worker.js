// Search in pages that are opened from disk: a browser starts no Worker from file:, so an invisible frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      const page = this.inside.document
      page.open()
      page.write("<!doctype html><body></body>")
      page.close()
      this.inside.importScripts = (...urls) =>
        urls.reduce((done, each) => done.then(() => new Promise((resolve, reject) => {
          const script = page.createElement("script")
          Object.assign(script, { src: each, onload: resolve, onerror: reject })
          page.body.append(script)
        })), Promise.resolve())
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = this.inside.importScripts(url)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
